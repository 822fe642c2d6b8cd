"""Before a layout is asked for: which size to train, on which chips, on how many, for how long.

`laws` say the loss of a size after so many tokens, `fitting` makes a law of the user's own runs, `forecast`
adds what a law is told besides (data that repeats, pre-training, replicas). `family` makes real models of
other sizes of the user's own, and `timing` searches the proven layout of each on each machine. `question`
says how many tokens follow from what is given, `answer` which sizes are searched where and which of them is
the best, by what `rows` say of each; `summary` puts it in plain data, and `sizing` is the door.
"""

"""Sizing: which size to train, on which chips, on how many, for how long.

`laws` give the loss of a size after a number of tokens, `fitting` fits a law to the user's runs, `forecast`
adds further inputs (repeated data, pre-training, replicas). `family` makes real models of other sizes of the
user's own, and `timing` searches the proven layout of each on each machine. `question` computes the number of
tokens from the goal, `answer` decides which sizes are searched where and which is best, from the `rows` of
each; `summary` converts it to plain data, and `sizing` is the public function.
"""

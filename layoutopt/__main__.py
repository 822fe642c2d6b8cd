"""The way in, of `layoutopt` and of `python -m layoutopt`: signals are owned, and time is counted, before
anything takes any."""

import signal


def main() -> None:
    """Entry point of the console script."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of the next import either
    # Of the modules themselves: the package would be asked for such names first, and look for what is near.
    from layoutopt.runtime.clock import begin
    from layoutopt.runtime.signals import start

    begin()
    start()
    from layoutopt.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()

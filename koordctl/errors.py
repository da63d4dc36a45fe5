"""The error of a command that cannot be carried out."""


class CommandError(Exception):
    """Wrong arguments or missing input; the message says what to do instead."""

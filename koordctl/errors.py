"""What a command says when it cannot do what it was asked."""


class CommandError(Exception):
    """A question that cannot be asked so; the message says how."""

"""Why a bed cannot be made."""


class BedError(Exception):
    """A bed cannot be made; the text says what was missing and what to do."""

"""The NRI transport: from bytes of the runtime to a decision and back."""

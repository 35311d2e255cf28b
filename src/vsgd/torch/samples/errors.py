"""What goes wrong when a model is recorded."""


class SampleError(RuntimeError):
    """The gradients of single samples cannot be told from this recording; the message says why and what to do."""

"""Per-coordinate sums over the samples of a minibatch, computed without storing per-sample gradients.

A `Recorder` watches the parameters of a model in two passes: at the parameters and at the shifted ones. The gradient of
one sample is a product of small factors that backpropagation computes anyway: the input of a layer and the gradient of
its output. Sums of its square and of its change follow from these factors.

A result is right, or an error is raised. Two assumptions are not checked. All functions in one recording must process
the same samples in the same order. If a loss mixes samples, as a contrastive loss does, the gradient of sample j is the
part that flows through the activations of sample j.
"""

from vsgd.torch.per_sample.fallback import Recording
from vsgd.torch.per_sample.record import Recorder
from vsgd.torch.per_sample.terms import RowSums, SampleError, SampleSums

__all__ = ["Recorder", "Recording", "RowSums", "SampleError", "SampleSums"]

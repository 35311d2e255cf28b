"""Sums over the samples of a minibatch, per coordinate, without the samples' gradients ever being written out.

A `Recorder` watches what the parameters of a model take part in, twice: at the parameters and at the shifted ones.
The gradient of one sample is a product of small factors that backpropagation computes anyway (the input of a layer
and the gradient of its output), and the sums of its square and of its change follow from those factors.

A result is right or an error is raised. Two things cannot be seen. All that runs in one recording is taken to be about
the same samples, in the same order. And of a loss that mixes samples, such as a contrastive one, "the gradient of
sample j" is the part that flows through the activations of sample j.
"""

from vsgd.torch.per_sample.record import Recorder, Recording
from vsgd.torch.per_sample.terms import RowSums, SampleError, SampleSums

__all__ = ["Recorder", "Recording", "RowSums", "SampleError", "SampleSums"]

"""Variants of what a lab trains, for tests: class Normed(variants.Normed, Config)."""

import sys

import cloudpickle
import torch
from torch import nn

from labs.kit import toy

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import it


class Double:
    """The weights are float64."""

    def build(self, layers=None):
        return super().build(layers).double()


class Normed:
    """The digits model with BatchNorm after its first layer."""

    def build(self, layers=None):
        model = super().build(layers)
        if "0" in model._modules:
            conv = model._modules["0"]
            model._modules["0"] = nn.Sequential(conv, nn.BatchNorm2d(32))
        return model


class Skips:
    """The third layer adds what the first one has put aside."""

    def build(self, layers=None):
        model, aside = super().build(layers), {}

        def put(module, args, output):
            aside["output"] = output

        def add(module, args, output):
            return output + aside["output"]

        for index, hook in (("1", put), ("3", add)):
            if index in model._modules:
                model._modules[index].register_forward_hook(hook)
        return model


class Nothing:
    """No target counts."""

    def data(self, step):
        inputs, targets = super().data(step)
        return inputs, torch.full_like(targets, toy.IGNORE)

"""Carry functions, results and source lines between the notebook and its ranks.

A function from a notebook cell has no file, so it travels by value (cloudpickle), and
the text of its cell travels with it: an error in a rank can then show the line.
"""

import io
import linecache
import os
import sys
import types

import cloudpickle
import torch

_LABS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
labels = {}  # file name of a code object -> what a reader calls it: "Cell In[2]"


class _Pickler(cloudpickle.Pickler):
    """cloudpickle that keeps file names, and moves tensors to the host."""

    def __init__(self, file):
        super().__init__(file)
        self.filenames = set()

    def reducer_override(self, obj):
        if isinstance(obj, types.CodeType):
            # cloudpickle >= 3.1.2 forgets the file name; messages need it.
            self.filenames.add(obj.co_filename)
            make, args = self.dispatch_table[types.CodeType](obj)
            name = {"<dynamic-code>": obj.co_filename}
            return make, tuple(name.get(a, a) if type(a) is str else a for a in args)
        if type(obj) is torch.Tensor and (obj.is_cuda or obj.grad_fn is not None):
            return _same, (obj.detach().cpu(),)
        return super().reducer_override(obj)


def _same(value):
    return value


def pack(value):
    """Return `value` as bytes: anything cloudpickle takes, with its source lines."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    sources = {
        name: (label(name), linecache.getlines(name))
        for name in pickler.filenames
        if not os.path.exists(name)
    }
    return cloudpickle.dumps(sources), buffer.getvalue()


def unpack(packed):
    """Return the value that `pack` packed, and make its source lines known here."""
    sources, value = packed
    for name, (title, lines) in cloudpickle.loads(sources).items():
        if name not in linecache.cache:  # in the notebook itself it may have changed
            labels[name] = title
            linecache.cache[name] = sum(map(len, lines)), None, lines, name
    return cloudpickle.loads(value)


def label(filename):
    """Return what a reader calls this source: a cell's number, or a short path."""
    if filename in labels:
        return labels[filename]
    if filename.startswith(_LABS):
        return os.path.relpath(filename, os.path.dirname(_LABS[:-1]))
    if os.path.exists(filename):
        short = os.path.relpath(filename)
        return filename if short.startswith("..") else short
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    cells = shell.user_ns.get("In", []) if shell else []
    source = "".join(linecache.getlines(filename)).rstrip("\n")
    for number in range(len(cells) - 1, 0, -1):
        if cells[number] == source:
            return f"Cell In[{number}]"
    return "a notebook cell" if "ipykernel" in filename else filename

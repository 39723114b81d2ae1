"""A kernel of ours compiled for a GPU that is not here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int16: "*i16",
    torch.int32: "*i32",
}


@dataclass
class Recorder:
    """Stands in for a kernel and keeps the arguments of its launch."""

    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, grid: tuple[int, int]) -> Recorder:
        return self

    def __call__(self, *arguments: object, **options: object) -> None:
        self.arguments, self.options = arguments, options


def shared_bytes(kernel: Any, launch: Recorder, target: tuple[Any, ...]) -> int:
    """Of shared memory, of the kernel compiled for the recorded launch on `target`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {key: x for key, x in launch.options.items() if key in kernel.arg_names}
    options = {key: x for key, x in launch.options.items() if key not in kernel.arg_names}
    signature = {name: "constexpr" for name in kernel.arg_names}
    attributes = {}
    for i, (name, x) in enumerate(zip(kernel.arg_names, launch.arguments, strict=False)):
        is_tensor = isinstance(x, torch.Tensor)
        signature[name] = TYPES[x.dtype] if is_tensor else "fp32" if type(x) is float else "i32"
        if is_tensor or signature[name] == "i32":
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget(*target), options=options)
    return int(compiled.metadata.shared)

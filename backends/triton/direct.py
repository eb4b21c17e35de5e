"""Start a compiled kernel by the C function of Triton's launcher itself, with addresses for tensors.

``CompiledKernel[grid]`` looks up the device and the stream, prepares for hooks that nobody has set, asks the driver
about every pointer and encodes every tensor map in Python, which takes five times as long as the launch.  On an H200
results were the same bits both ways: of forwards and backwards, packed too, of forwards on two streams and in a CUDA
graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import triton

__all__ = ["Start", "starter"]

Start = Callable[[tuple[Any, ...]], bool]
_MAPS = 64  # kept of one launch, 3 KiB each at most; an allocator hands out the same addresses again and again


class _Maps(dict[tuple[int, ...], tuple[Any, ...]]):
    """The kernel's arguments for descriptors, by their addresses; Triton's maps are never changed, so one serves again.

    ``how``: of each descriptor what encodes it behind its address, and what the kernel is given beside its map.
    """

    def __init__(self, encode: Callable[..., Any], how: Sequence[tuple[tuple[Any, ...], tuple[int, ...]]]) -> None:
        super().__init__()
        self._encode, self._how = encode, how

    def __missing__(self, addresses: tuple[int, ...]) -> tuple[Any, ...]:
        found: list[Any] = []
        for address, (shape, sizes) in zip(addresses, self._how, strict=True):
            found += [self._encode(address, *shape), *sizes]
        if len(self) >= _MAPS:
            self.clear()
        made = self[addresses] = tuple(found)
        return made


def starter(
    compiled: Any, grid: tuple[int, int, int], first: Sequence[Any], constants: tuple[Any, ...]
) -> Start | None:
    """Starts what ``compiled`` is for these first arguments and constants, on the current stream of the current device.

    It takes the first arguments once more, with addresses, multiples of 16, for tensors and descriptors, and returns
    whether it started the kernel: not where a profiler has set hooks, which want the tensors.  None where this release
    of Triton launches in another way than those known here, or where the kernel needs memory that its launcher
    allocates.
    """
    make = _RELEASES.get(tuple(triton.__version__.split(".")[:2]))
    try:
        return None if make is None else make(compiled, grid, first, constants)
    except (AttributeError, ImportError, KeyError, TypeError, ValueError):  # a build that differs from its release
        return None


def _of_3_6(
    compiled: Any, grid: tuple[int, int, int], first: Sequence[Any], constants: tuple[Any, ...]
) -> Start | None:
    """For ``triton/backends/nvidia/driver.py`` (``CudaLauncher``, ``wrap_handle_tensordesc``) of Triton 3.6."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST, CudaLauncher
    from triton.knobs import HookChain
    from triton.runtime.driver import driver

    launcher = compiled.run
    if type(launcher) is not CudaLauncher or launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    launch, encodings = launcher.launch, []
    descriptors = [each for each in first if hasattr(each, "block_shape")]
    if descriptors:
        wrapped = dict(
            zip(launch.__code__.co_freevars, (cell.cell_contents for cell in launch.__closure__), strict=True)
        )
        launch, metas = wrapped["launcher"], wrapped["tensordesc_meta"]
        if set(wrapped["tensordesc_indices"]) != set(range(len(descriptors))):
            return None
        for each, meta in zip(descriptors, metas, strict=True):
            if meta is None or meta["fp4_padded"] or each.strides[-1] != 1:
                return None
            how = (
                meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], meta["block_size"],
                list(each.shape), list(each.strides), int(each.padding == "nan"),
            )  # fmt: skip
            encodings.append((how, (*each.shape, *each.strides)))
    maps, count = _Maps(driver.active.utils.fill_tma_descriptor, encodings), len(encodings)
    number, stream = driver.active.get_current_device(), driver.active.get_current_stream
    x, y, z = grid
    # No scratch memory, and neither metadata for hooks nor hooks.
    asked = (
        compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None, compiled.packed_metadata,
        None, None, None,
    )  # fmt: skip
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    if type(enter) is not HookChain or type(leave) is not HookChain:
        return None

    def start(addresses: tuple[Any, ...]) -> bool:
        if (
            runtime.launch_enter_hook is not enter or runtime.launch_exit_hook is not leave
            or enter.calls or leave.calls
        ):  # fmt: skip
            return False
        if count:
            described = maps[addresses[:count]]
            launch(x, y, z, stream(number), *asked, *described, *addresses[count:], *constants)
        else:
            launch(x, y, z, stream(number), *asked, *addresses, *constants)
        return True

    return start


_RELEASES: dict[tuple[str, ...], Callable[..., Start | None]] = {("3", "6"): _of_3_6}

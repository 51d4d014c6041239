"""Every private name of torch that this package uses, and those that functions and classes have.

A private name may be gone in any release of torch. So each has one row here: why it is used, and in a comment
above it the public name that could replace it, and why that does not serve.

Functions and classes are attributes of this module, without their underscores: ``torch_private.NormBase``.
They are looked up at their first use, so that a release without one breaks what needs it, and nothing else.
Attributes of tensors, modules and groups are used in place, as ``tensor._version``.

`tests/test_torch_private.py` finds private names that have no row here. Recipes, which are examples, are not
searched.
"""

from __future__ import annotations

import pkgutil
from typing import Any

import torch

TRIED = "2.11 to 2.14"

# Functions and classes, by ``module:name``.
NAMES = {
    "torch.autograd:Variable._execution_engine": "to be called when a backward ends",
    "torch._C:_current_graph_task_id": "to notice that an exception has ended a backward",
    "torch._C:_current_autograd_node": "to name what holds memory in backward",
    "torch._C:DisableTorchFunction": "to run an operation as it is",
    # Public: torch.Tensor.as_subclass, which makes a node for autograd.
    "torch._C:DisableTorchFunctionSubclass": "to compute with a subclass of Tensor as a plain one",
    # Public: DisableTorchFunctionSubclass, which takes three times as long.
    "torch._C:_disabled_torch_function_impl": "to ask a parameter that shows a shard, not its class",
    # Public: record_function by itself, which takes 8 µs where this takes 0.05.
    "torch._C._autograd:_profiler_enabled": "to make ranges for a profile alone",
    "torch._C._dynamo.eval_frame:get_eval_frame_callback": "to notice compiled code around a call",
    # Public: torch.func.debug_unwrap of a new tensor, which takes 60 times as long.
    "torch._C._functorch:peek_interpreter_stack": "to notice vmap and torch.func around a call",
    # Public: torch.compiler.disable, which imports the compiler: seconds.
    "torch._compile:_disable_dynamo": "to keep hooks out of compiled graphs",
    "torch._dynamo:config": "to compile as many kinds of blocks as a model has",
    "torch._inductor.cpp_builder:get_cpp_compiler": "to refuse inductor without a C++ compiler",
    "torch._inductor.exc:InvalidCxxCompiler": "to refuse inductor without a C++ compiler",
    "torch.utils._triton:has_triton": "to refuse inductor without Triton",
    "torch._subclasses:FakeTensor": "to shard the model of a plan, which has no memory",
    "torch._subclasses.fake_tensor:FakeTensorMode": "to plan a model that has no memory",
    "torch.utils._python_dispatch:TorchDispatchMode": "to see the operations of a captured or planned step",
    "torch.utils._python_dispatch:_disable_current_modes": "to try an optimizer while a model is planned",
    # Public, for both: none; `torch.utils.pytree` is planned.
    "torch.utils._pytree:tree_leaves": "to find tensors in arguments and outputs",
    "torch.utils._pytree:tree_map": "to cast tensors in arguments and outputs",
    # Public, for both: the classes that torch.nn has, which misses users' own.
    "torch.nn.modules.batchnorm:_NormBase": "to find all kinds of BatchNorm, users' own included",
    "torch.nn.modules.conv:_ConvNd": "to find all kinds of convolutions",
    # Public, for both: torch.cpu.get_capabilities, whose keys depend on the machine.
    "torch.cpu:_is_avx512_bf16_supported": "to choose bf16 where the CPU multiplies it",
    "torch.cpu:_is_amx_tile_supported": "to choose bf16 where the CPU multiplies it",
    "torch.distributed.distributed_c10d:_coalescing_manager": "to launch several collectives as one",
    # Public: torch.distributed.set_timeout, which is used where it exists.
    "torch.distributed.distributed_c10d:_set_pg_timeout": "to set the time-out of a group",
    "torch.distributed.distributed_c10d:_world.pg_map": "to find all process groups",
}

# Names that are used in place, by ``module:expression``. Those that are overridden, implemented or written
# for torch to read say so.
IN_PLACE = {
    # Public: forward_ad.unpack_dual, which takes 40 times as long.
    "torch.autograd.forward_ad:_current_level": "to notice that dual numbers are in use",
    "torch:Tensor._version": "to notice that a user has changed a tensor",
    "torch:Tensor._base": "to find the node of a view's base",
    "torch:Tensor._post_accumulate_grad_hooks": "to call users' hooks once gradients are reduced",
    "torch.optim:SGD([{'params': []}])._optimizer_step_pre_hooks": "to begin a step after users' hooks",
    "torch.optim:SGD([{'params': []}])._optimizer_step_post_hooks": "to end a step before users' hooks",
    # Public: data_ptr, which is 0 for all empty ones.
    "torch:UntypedStorage._cdata": "to compare storages",
    "torch:_foreach_norm": "to launch an operation once for many tensors; so do all torch._foreach_*",
    # Public: named_parameters, which takes 10 times as long.
    "torch.nn:Module()._parameters": "to find a parameter that a user has replaced",
    # Public: named_children, which takes 10 times as long.
    "torch.nn:Module()._modules": "to notice that a module was attached",
    # Public: setattr, which some modules override.
    "torch.nn:Module()._buffers": "to move buffers to a device",
    "torch.nn:Module._apply": "overridden: `to_empty` of FSDP2's marked modules shards them first",
    "torch.nn:MultiheadAttention._reset_parameters": "overridden: fan-ins are those of whole parameters",
    "torch.amp:GradScaler._unscale_grads_": "overridden: an overflow on one rank counts on all",
    "torch.distributed:ProcessGroup._get_backend": "to read the time-out of a group",
    "torch.distributed:ProcessGroupGloo.Options._timeout": "to read the time-out of a group",
    "torch._dynamo:disable(print)._torchdynamo_disable": "written: torch.compile breaks the graph at a unit",
    "torch.distributed._checkpointable:_Checkpointable.__create_write_items__": "implemented: to save pieces",
    "torch.distributed._checkpointable:_Checkpointable.__create_chunk_list__": "implemented: to load pieces",
    "torch.distributed._checkpointable:_Checkpointable.__get_tensor_shard__": "implemented: to read pieces",
}

_BY_NAME = {path.rpartition(".")[2].rpartition(":")[2].lstrip("_"): path for path in NAMES}


def __getattr__(name: str) -> Any:
    """Return torch's private function or class ``name``. Raises ImportError if this torch has none."""
    if name not in _BY_NAME:
        raise AttributeError(f"module {__name__!r} has no row for {name!r}")
    path = _BY_NAME[name]
    try:
        value = pkgutil.resolve_name(path)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"torch {torch.__version__} has no {path.replace(':', '.')}, which shardtrain uses "
            f"{NAMES[path]}: install a torch with which it was tried, {TRIED}"
        ) from error
    globals()[name] = value
    return value

"""Every private name of torch that this package uses, and those that functions and classes have.

A private name may be gone in any release of torch. So each has one row here: why it is used, the public name
that could replace it, and a test that fails without it.

Functions and classes are attributes of this module, without their underscores: ``torch_private.NormBase``.
They are looked up at their first use, so that a release without one breaks what needs it, and nothing else.
Attributes of tensors, modules and groups, and a base class, are used in place, as ``tensor._version``.

`tests/test_torch_private.py` finds private names that have no row here. Recipes, which are examples, are not
searched.
"""

from __future__ import annotations

import pkgutil
from typing import Any, NamedTuple

import torch

TRIED = "2.11 to 2.14"


class Row(NamedTuple):
    """One private name: why it is used, and its ``test``, as ``file::function`` in tests.

    ``public``: the public substitute, and why it does not serve; empty if there is none.
    """

    why: str
    test: str
    public: str = ""


_STEP = "test_engine.py::test_losses_and_gradients_of_three_steps_equal_ddp_s"
_COMPILE = "test_forwards.py::test_blocks_compute_what_others_do"
_PLAN = "test_plan.py::test_a_plan_is_kept"
_DCP = "test_state.py::test_any_world_size_reads_any_other"
_PYTREE = "has no public module; `torch.utils.pytree` is planned"

# Functions and classes, by ``module:name``.
NAMES = {
    "torch.autograd:Variable._execution_engine": Row("to be called when a backward ends", _STEP),
    "torch._C:_current_graph_task_id": Row(
        "to notice that an exception has ended a backward",
        "test_schedule.py::test_programs_of_up_to_four_calls",
    ),
    "torch._C:_current_autograd_node": Row("to name what holds memory in backward", _PLAN),
    "torch._C:DisableTorchFunction": Row(
        "to run an operation as it is", "test_capture.py::test_collectives_of_the_host_are_refused"
    ),
    "torch._C:DisableTorchFunctionSubclass": Row(
        "to compute with a subclass of Tensor as a plain one",
        "test_engine.py::test_clipping_equals_ddp_s",
        "torch.Tensor.as_subclass, which makes a node for autograd",
    ),
    "torch._C:_disabled_torch_function_impl": Row(
        "to ask a parameter that shows a shard without asking its class",
        "test_uncalled_units.py::test_what_tells_no_size_of_a_closed_unit_s_parameter_is_right",
        "DisableTorchFunctionSubclass, which takes three times as long",
    ),
    "torch._C._autograd:_profiler_enabled": Row(
        "to make ranges for a profile alone",
        "test_monitor.py::test_a_profile_is_written_when_training_ends_first_and_dropped_when_it_fails",
        "record_function by itself, which takes 8 µs where this takes 0.05",
    ),
    "torch._C._dynamo.eval_frame:get_eval_frame_callback": Row(
        "to notice compiled code that runs around a call", _COMPILE
    ),
    "torch._C._functorch:peek_interpreter_stack": Row(
        "to notice vmap and torch.func around a call",
        "test_user_code.py::test_uses_of_a_sharded_model_are_refused",
        "torch.func.debug_unwrap of a new tensor, which takes 60 times as long",
    ),
    "torch._compile:_disable_dynamo": Row(
        "to keep hooks out of compiled graphs",
        _COMPILE,
        "torch.compiler.disable, which imports the compiler: seconds",
    ),
    "torch._dynamo:config": Row(
        "to compile as many kinds of blocks as a model has",
        "test_forwards.py::test_more_kinds_of_blocks_are_compiled_than_torch_does_by_itself",
    ),
    "torch._inductor.cpp_builder:get_cpp_compiler": Row(
        "to refuse inductor without a C++ compiler",
        "test_train.py::test_compiling_without_a_compiler_is_a_mistake",
    ),
    "torch._inductor.exc:InvalidCxxCompiler": Row(
        "to refuse inductor without a C++ compiler",
        "test_train.py::test_compiling_without_a_compiler_is_a_mistake",
    ),
    "torch.utils._triton:has_triton": Row(
        "to refuse inductor without Triton",
        "test_forwards.py::test_inductor_needs_triton_on_a_gpu",
    ),
    "torch._subclasses:FakeTensor": Row("to shard the model of a plan, which has no memory", _PLAN),
    "torch._subclasses.fake_tensor:FakeTensorMode": Row("to plan a model that has no memory", _PLAN),
    "torch.utils._python_dispatch:TorchDispatchMode": Row(
        "to hold the memory of a captured step, and to refuse its collectives of the host",
        "test_capture.py::test_collectives_of_the_host_are_refused",
    ),
    "torch.utils._python_dispatch:_disable_current_modes": Row(
        "to try an optimizer with values while a model is planned", _PLAN
    ),
    "torch.utils._pytree:tree_leaves": Row(
        "to find tensors in arguments and outputs",
        "test_precision.py::test_what_is_cast_and_what_is_not",
        _PYTREE,
    ),
    "torch.utils._pytree:tree_map": Row(
        "to cast tensors in arguments and outputs",
        "test_precision.py::test_casting_keeps_containers",
        _PYTREE,
    ),
    "torch.nn.modules.batchnorm:_NormBase": Row(
        "to find all kinds of BatchNorm, users' own included",
        "test_precision.py::test_what_is_cast_and_what_is_not",
        "the classes that torch.nn has, which misses users' own",
    ),
    "torch.nn.modules.conv:_ConvNd": Row(
        "to find all kinds of convolutions",
        "test_engine.py::test_automatic_units_are_blocks",
        "the classes that torch.nn has, which misses users' own",
    ),
    "torch.cpu:_is_avx512_bf16_supported": Row(
        "to choose bf16 where the CPU multiplies it",
        "test_keys.py::test_all_other_keys_act",
        "torch.cpu.get_capabilities, whose keys depend on the machine",
    ),
    "torch.cpu:_is_amx_tile_supported": Row(
        "to choose bf16 where the CPU multiplies it",
        "test_keys.py::test_all_other_keys_act",
        "torch.cpu.get_capabilities, whose keys depend on the machine",
    ),
    "torch.distributed.distributed_c10d:_coalescing_manager": Row(
        "to launch several calls of one collective as one",
        "test_cuda.py::test_every_way_equals_the_plain_model",
    ),
    "torch.distributed.distributed_c10d:_set_pg_timeout": Row(
        "to set the time-out of a group",
        "test_keys.py::test_the_time_out_is_shorter_after_the_first_step",
        "torch.distributed.set_timeout, which is used where it exists",
    ),
    "torch.distributed.distributed_c10d:_world.pg_map": Row(
        "to find all process groups", "test_keys.py::test_the_time_out_is_shorter_after_the_first_step"
    ),
}

# Names that are used in place, by ``module:expression``. Those that are overridden, implemented or written
# for torch to read say so.
IN_PLACE = {
    "torch.utils._python_dispatch:TorchDispatchMode": Row(
        "a base class: to see each operation of a planned step", _PLAN
    ),
    "torch.autograd.forward_ad:_current_level": Row(
        "to notice that dual numbers are in use",
        "test_forwards.py::test_dual_numbers",
        "forward_ad.unpack_dual, which takes 40 times as long",
    ),
    "torch:Tensor._version": Row(
        "to notice that a user has changed a tensor",
        "test_user_code.py::test_edits_of_whole_parameters_between_forward_and_backward_are_refused",
    ),
    "torch:Tensor._base": Row(
        "to find the node of a view's base",
        "test_engine.py::test_a_view_whose_backward_reads_a_parameter_gathers_it",
    ),
    "torch:Tensor._post_accumulate_grad_hooks": Row(
        "to call users' hooks once gradients are reduced",
        "test_user_code.py::test_users_post_accumulate_hooks_fire_once_at_rest_with_the_reduced_piece",
    ),
    "torch.optim:SGD([{'params': []}])._optimizer_step_pre_hooks": Row(
        "to begin a step after users' hooks",
        "test_gradients.py::test_users_code_in_a_step_sees_pieces",
    ),
    "torch.optim:SGD([{'params': []}])._optimizer_step_post_hooks": Row(
        "to end a step before users' hooks",
        "test_gradients.py::test_users_code_in_a_step_sees_pieces",
    ),
    "torch:UntypedStorage._cdata": Row(
        "to compare storages",
        "test_engine.py::test_edits_and_conversions_after_sharding_take_effect",
        "data_ptr, which is 0 for all empty ones",
    ),
    "torch:_foreach_norm": Row(
        "to launch an operation once for many tensors; so do all torch._foreach_*",
        "test_engine.py::test_clipping_equals_ddp_s",
    ),
    "torch.nn:Module()._parameters": Row(
        "to find a parameter that a user has replaced",
        "test_user_code.py::test_edits_are_refused_by_name",
        "named_parameters, which takes 10 times as long",
    ),
    "torch.nn:Module()._modules": Row(
        "to notice that a module was attached",
        "test_user_code.py::test_edits_are_refused_by_name",
        "named_children, which takes 10 times as long",
    ),
    "torch.nn:Module()._buffers": Row(
        "to move buffers to a device", _STEP, "setattr, which some modules override"
    ),
    "torch.nn:Module._apply": Row(
        "overridden: `to_empty` of FSDP2's marked modules shards them first",
        "test_fsdp.py::test_a_script_has_the_losses_of_fsdp2",
    ),
    "torch.nn:MultiheadAttention._reset_parameters": Row(
        "overridden: fan-ins are those of whole parameters",
        "test_user_code.py::test_initialization_draws_what_it_draws_for_the_whole_model",
    ),
    "torch.amp:GradScaler._unscale_grads_": Row(
        "overridden: an overflow on one rank counts on all",
        "test_precision.py::test_all_ranks_skip_a_step_that_overflows_on_one",
    ),
    "torch.distributed:ProcessGroup._get_backend": Row(
        "to read the time-out of a group",
        "test_guard.py::test_a_stopped_rank_is_named_at_the_time_out_of_the_user",
    ),
    "torch.distributed:ProcessGroupGloo.Options._timeout": Row(
        "to read the time-out of a group",
        "test_guard.py::test_a_stopped_rank_is_named_at_the_time_out_of_the_user",
    ),
    "torch._dynamo:disable(print)._torchdynamo_disable": Row(
        "written: torch.compile breaks the graph at a call of a unit", _COMPILE
    ),
    "torch.distributed._checkpointable:_Checkpointable.__create_write_items__": Row(
        "implemented: DCP saves pieces in place", _DCP
    ),
    "torch.distributed._checkpointable:_Checkpointable.__create_chunk_list__": Row(
        "implemented: DCP loads pieces in place", _DCP
    ),
    "torch.distributed._checkpointable:_Checkpointable.__get_tensor_shard__": Row(
        "implemented: DCP reads and writes pieces in place", _DCP
    ),
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
            f"{NAMES[path].why}: install a torch with which it was tried, {TRIED}"
        ) from error
    globals()[name] = value
    return value

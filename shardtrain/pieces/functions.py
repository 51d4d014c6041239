"""The functions of torch that this package's tensor subclasses take; all others are refused.

Two subclasses stand for a part of a tensor: a piece, and its norm before ranks have added theirs (both in
``piece.py``).

A function is right on a piece if it treats each element by itself, whatever its neighbours are. A shape does
not tell: ``g - g.mean(dim=1, keepdim=True)``, ``softmax`` and ``cumsum`` keep it, and compute something else
on a piece than on the whole gradient. So functions are listed by name, without the marks of their variants:
``add`` stands for ``add_``, ``_foreach_add_``, ``__radd__``, ``__iadd__`` and the operator ``aten::add``.
Random numbers are not listed: ranks with one seed would draw the same numbers for different elements.

A piece tells its sizes, but not in an optimizer's step, which would compute with them. What no
class of tensors can see, `UNSEEN` lists. ``docs/failures.md`` promises both, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

ARITHMETIC = """
    abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh
    asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift
    bitwise_xor ceil celu clamp clamp_max clamp_min clip complex conj conj_physical copysign cos cosh
    deg2rad digamma div divide elu eq erf erfc erfinv exp exp2 expm1 fix float_power floor floor_divide
    fmax fmin fmod frac gcd ge gelu greater greater_equal gt hardshrink hardsigmoid hardswish hardtanh
    heaviside hypot i0 igamma igammac imag invert isclose isfinite isinf isnan isneginf isposinf isreal
    lcm ldexp le leaky_relu lerp less less_equal lgamma log log10 log1p log2 log_sigmoid logaddexp
    logaddexp2 logical_and logical_not logical_or logical_xor logit logsigmoid lt masked_fill maximum
    minimum mish mod mul multiply nan_to_num ne neg negative nextafter not_equal polar positive pow
    rad2deg real reciprocal relu relu6 remainder resolve_conj resolve_neg round rsqrt rsub selu sgn
    sigmoid sign signbit silu sin sinc sinh softplus softshrink softsign sqrt square sub subtract tan tanh
    tanhshrink threshold true_divide trunc where xlogy
    """
OPERATORS = "add and div eq floordiv ge gt le lshift lt mod mul ne or pow rshift sub truediv xor"
SPECIAL = """
    digamma entr erf erfc erfcx erfinv exp2 expit expm1 gammainc gammaincc gammaln i0 i0e i1 i1e log1p
    log_ndtr logit ndtr ndtri psi round sinc xlog1py xlogy zeta
    """
# Copies, conversions and tensors of the same shape.
COPIES = """
    alias apply bfloat16 bool byte cdouble cfloat chalf char clone contiguous copy cpu cuda detach
    double empty_like fill float full_like half int long mtia ones_like pin_memory short to type
    type_as xpu zero zeros_like
    """
NEW = "new_empty new_full new_ones new_tensor new_zeros"  # unrelated tensors
# Views of all elements; and all elements of several pieces.
VIEWS = """
    adjoint atleast_1d atleast_2d atleast_3d flatten moveaxis movedim permute ravel reshape
    reshape_as squeeze swapaxes swapdims t transpose unflatten unsqueeze view view_as view_as_complex
    view_as_real
    """
# What describes a tensor by neither elements nor sizes, and what else describes it, or reads an attribute.
DESCRIPTIONS = """
    __dir__ __format__ __repr__ dim element_size get_device is_complex is_conj is_contiguous is_floating_point
    is_inference is_neg is_pinned is_shared is_signed ndimension register_hook
    register_post_accumulate_grad_hook retain_grad share_memory_
    """
OTHERWISE = """
    __delete__ __get__ __set__ _has_compatible_shallow_copy_type _is_view backward dense_dim dim_order
    is_coalesced is_distributed is_same_size is_set_to record_stream sparse_dim storage_offset
    """
# Right on a parameter at any time, by the name of the attribute: what tells neither elements nor sizes.
ATTRIBUTES = """
    _backward_hooks _base _grad _grad_fn _post_accumulate_grad_hooks _version data_ptr device dtype grad
    grad_fn is_cpu is_cuda is_leaf is_meta is_mps is_nested is_quantized is_sparse is_sparse_csr is_xpu
    itemsize layout name ndim output_nr requires_grad requires_grad_ retains_grad untyped_storage
    """
PASSING = frozenset((*ATTRIBUTES.split(), *DESCRIPTIONS.split()))
# By these other packages' kernels read the memory of a tensor.
MEMORY = {"const_data_ptr", "data_ptr", "untyped_storage"}
# What a piece tells of its sizes, which are those of what this rank has of the gradient.
SIZES = ("shape", "size", "numel", "nelement", "stride")
COUNTS = ("numel", "nelement")  # which are of the whole tensor, as a DTensor's
# What asks no class. If it did for sizes, TorchScript and `to_dlpack` would be seen, and each step would cost
# 8 µs more per parameter, since setting ``.grad`` asks, too. Nothing is asked where `data` is set.
UNSEEN = ("to_dlpack", "size", "data")
# Steps of torch's fused optimizers, and their loss scaling.
FUSED = """
    _amp_foreach_non_finite_check_and_unscale_ _amp_non_finite_check_and_unscale_ _fused_adagrad_ _fused_adam_
    _fused_adamw_ _fused_sgd_
    """
_DESCRIBING = frozenset((*DESCRIPTIONS.split(), *OTHERWISE.split(), *FUSED.split()))
_COMBINING = frozenset(ARITHMETIC.split())
_NAMES = OPERATORS.split()
_NAMES += [f"{prefix}{name}" for prefix, name in product("ri", _NAMES)]
_EXACT = {f"__{name}__" for name in _NAMES}
_EXACT |= {f"special_{name}" for name in SPECIAL.split()} | {"__invert__", "max", "min"}
_OTHERS = frozenset((*COPIES.split(), *VIEWS.split(), *NEW.split()))
# Of a whole parameter, too: ranks with one seed would draw the same numbers for different parameters.
DRAWING = {"bernoulli", "bernoulli_", "cauchy_", "dropout", "exponential_", "geometric_", "log_normal_"}
DRAWING |= {"normal_", "poisson", "rand_like", "randint_like", "randn_like", "random_", "uniform_"}
JOINING = {"cat", "concat", "concatenate", "hstack", "vstack", "stack"}
_READING = {"__getitem__", "masked_select"}
_WRITING = {"__setitem__", *(f"__i{name}__" for name in OPERATORS.split())}
_OVERWRITING = {"copy_", "fill_", "zero_"}
_SELECTING = {*_READING, "__setitem__", "index_put", "index_put_"}
# All views but those that add or take a dimension of two numbers per element.
_RESHAPING = frozenset(VIEWS.split()) - {"view_as_real", "view_as_complex"}
# Results are plain tensors, unless a piece is their value.
UNMARKED = {*NEW.split()}
# Norms, which ranks add up, and what leaves a norm what it is.
NORMS = {Tensor.norm, torch.norm, torch.linalg.norm, torch.linalg.vector_norm, torch._foreach_norm}
SAME_NORMS = {Tensor.detach, Tensor.data.__get__, Tensor.float, Tensor.double, Tensor.to, Tensor.cpu}  # type: ignore[attr-defined]
SAME_NORMS |= {torch.cat, torch.stack}


def is_element_wise(func: Any, args: Sequence[Any], kind: type[Tensor]) -> bool:
    """Return whether ``func`` of ``args`` treats each element of tensors of ``kind`` by itself."""
    name = func.__name__
    if name == "__get__" and name_of(func) == "__cuda_array_interface__":  # by which others read the memory
        return False
    if name in ("max", "min"):  # of two tensors
        return len(args) > 1 and isinstance(args[1], Tensor)
    if name == "where":  # of a condition alone it lists places
        return len(args) > 1
    if name in _SELECTING:
        return len(args) > 1 and _selects_by_element(args)
    if name in JOINING:
        return bool(args) and all(isinstance(tensor, kind) for tensor in args[0])
    return describes(func) or changes_no_shape(func) or _plain_name(name) in _OTHERS or tells_sizes(func)


def name_of(func: Any) -> str:
    """Return the name of ``func``; of a function that reads an attribute, the attribute's."""
    name: str = func.__name__
    if name != "__get__":
        return name
    attribute = func.__self__
    attribute = attribute.fget if isinstance(attribute, property) else attribute
    return str(getattr(attribute, "__name__", name))


def describes(func: Any) -> bool:
    """Return whether ``func`` only describes a tensor, or steps in place for an optimizer."""
    return func.__name__ in _DESCRIBING


def changes_no_shape(func: Any) -> bool:
    """Return whether ``func`` combines its tensors element by element, in one shape."""
    return func.__name__ in _EXACT or _plain_name(func.__name__) in _COMBINING


def changes_in_place(func: Any) -> bool:
    """Return whether ``func`` writes into its first argument, a tensor or a list of them."""
    name = func.__name__
    return name in _WRITING or (name[-1:] == "_" and name[-2:] != "__")


def overwrites(func: Any) -> bool:
    """Return whether ``func`` gives its first argument other values, whatever it holds."""
    return func.__name__.removeprefix("_foreach_") in _OVERWRITING


def tells_sizes(func: Any) -> bool:
    """Return whether ``func`` returns sizes of a tensor."""
    return func.__name__ == "__len__" or name_of(func) in SIZES


def reshapes(func: Any) -> bool:
    """Return whether ``func`` returns a view, or a copy, whose shape may be another."""
    return _plain_name(func.__name__) in _RESHAPING


def counts_elements(func: Any, args: Sequence[Any]) -> bool:
    """Return whether the result of the element-wise ``func`` has those elements that a mask selects."""
    if func.__name__ not in _READING:
        return False
    index = args[1] if isinstance(args[1], tuple | list) else [args[1]]
    return any(isinstance(item, Tensor) for item in index)


def is_collective(func: Any) -> bool:
    """Return whether ``func`` is one of ``torch.distributed``, or an operator behind one."""
    module = str(getattr(func, "__module__", ""))
    return module.startswith(("torch.distributed", "torch._ops._c10d", "torch._ops.c10d"))


def _plain_name(name: str) -> str:
    """Return ``name`` without the marks of functions of lists, and of those that work in place."""
    name = name.removeprefix("_foreach_")
    return name[:-1] if name[-1:] == "_" and name[:1] != "_" else name


def _selects_by_element(args: Sequence[Any]) -> bool:
    """Return whether an index takes all or selects by a mask. Numbers would count this rank's elements."""
    tensor, index = args[:2]
    items = index if isinstance(index, tuple | list) else [index]
    return all(_takes_all(item) or _is_mask(item, tensor) for item in items)


def _takes_all(item: Any) -> bool:
    return item is None or item is ... or (isinstance(item, slice) and item == slice(None))


def _is_mask(index: Any, tensor: Tensor) -> bool:
    if not (isinstance(index, Tensor) and index.dtype == torch.bool):
        return False
    return index.as_subclass(Tensor).shape == tensor.as_subclass(Tensor).shape

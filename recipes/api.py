"""Print docs/api.md, the public names with their signatures, from their docstrings.

python -m shardtrain.recipes.api > docs/api.md
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from shardtrain import fsdp, public

HEAD = """# Public names

Made from docstrings by `python -m shardtrain.recipes.api > docs/api.md`. [sharding.md](sharding.md) explains
what they are for, and [training.md](training.md) the commands. Names that are not here may change."""
PUBLIC = [
    name
    for name, value in sorted(vars(public).items(), key=lambda item: item[0].lower())
    if name[0] != "_" and (inspect.isfunction(value) or inspect.isclass(value))
]
NAMES = {
    public: PUBLIC,
    fsdp: ["fully_shard", "FSDPModule", "register_fsdp_forward_method"],
    public.checkpoint: ["save", "load"],
    public.comm: [
        "all_gather_into_tensor",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "all_to_all",
        "all_to_all_single",
        "all_reduce",
        "broadcast",
        "meter",
        "set_time_out",
        "Diverged",
        "PeerLost",
    ],
}
LONGEST = 100  # characters of a line


def signature(name: str, value: Any) -> str:
    """Return ``name(parameters) -> result``, on several lines if it is long."""
    own = getattr(value.__init__, "__module__", None) or "builtins"
    if own.startswith(("torch", "builtins")) and inspect.isclass(value):  # inherited, and of some version
        return name
    text = f"{name}{inspect.signature(value)}"
    text = re.sub(r"(: |-> )'([^']+)'", r"\1\2", text)  # annotations are strings
    if len(text) <= LONGEST:
        return text
    first, _, rest = text.partition("(")
    inside, _, result = rest.rpartition(")")
    parts = re.split(r", (?=\*{0,2}\w+(?:[:=]|$)|[*/](?:,|$))", inside)
    return "\n".join([f"{first}(", *(f"    {part}," for part in parts), f"){result}"])


def text() -> str:
    lines = [HEAD]
    for module, names in NAMES.items():
        title = module.__name__.removesuffix(".public")
        lines += ["", f"## {title}"]
        for name in names:
            value = getattr(module, name)
            document = inspect.cleandoc(value.__doc__ or "").replace("``", "`")
            full = f"{title.partition('.')[2]}.{name}".lstrip(".")
            lines += ["", f"### {full}", "", "```text", signature(full, value), "```", "", document]
    return "\n".join(lines)


if __name__ == "__main__":
    print(text())

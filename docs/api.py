"""Print docs/api.md, the public names with their signatures and the first paragraph of their docstrings.

python docs/api.py > docs/api.md
"""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any

from shardtrain import fsdp, public

HEAD = """# Public names

Signatures, and the first paragraph of each docstring: `python docs/api.py > docs/api.md`.
`help(shardtrain.shard)` has shapes, dtypes and errors, too. [sharding.md](sharding.md) explains the names,
[training.md](training.md) the commands. `Averages`: a tensor per parameter, such as
`optim.Ema(model, decay).averages`, of which every rank calls `update(step)`. Other names may change."""
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
WIDTH = 126  # characters of a line


def signature(name: str, value: Any) -> str:
    """Return ``name(parameters) -> result``."""
    own = getattr(value.__init__, "__module__", None) or "builtins"
    if own.startswith(("torch", "builtins")) and inspect.isclass(value):  # inherited, and of some version
        return name
    text = f"{name}{inspect.signature(value)}"
    text = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text).replace("<factory>", "…")
    return re.sub(r"(: |-> )'([^']+)'", r"\1\2", text)  # annotations are strings


def text() -> str:
    """Return the page: a heading for each module, an entry for each name."""
    lines = [HEAD]
    for module, names in NAMES.items():
        title = module.__name__.removesuffix(".public")
        lines += ["", f"## {title}", ""]
        for name in names:
            value = getattr(module, name)
            full = f"{title.partition('.')[2]}.{name}".lstrip(".")
            first = inspect.cleandoc(value.__doc__ or "").partition("\n\n")[0].replace("``", "`")
            lines.append(f"- `{signature(full, value)}`:")
            lines += textwrap.wrap(first, WIDTH, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(lines)


if __name__ == "__main__":
    print(text())

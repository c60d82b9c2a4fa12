"""Read rule, citation and parameters out of docstrings; docs/papers.md is generated here."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from fedveil.algorithms.published import SECTION, meanings

PAPERS = {
    "Zhang et al. 2022": "Understanding Clipping for Federated Learning: Convergence and "
    "Client-Level Differential Privacy",
    "Das et al. 2021": "DP-NormFedAvg: Normalizing Client Updates for Privacy-Preserving "
    "Federated Learning",
    "Das et al. 2022": "On the Convergence of Differentially Private Federated Learning on "
    "Non-Lipschitz Objectives, and with Normalized Client Updates",
    "Shulgin et al. 2025": "First Provable Guarantees for Practical Private FL: Beyond "
    "Restrictive Assumptions",
    "DP-LSGD": "Why DP “Local” SGD – Faster Convergence in Less Composition with Clipping Bias "
    "Reduction",
}
CITATION = re.compile(
    r"(?:[A-Z][\w-]+ (?:et al\.|and [A-Z][\w-]+) \d{4}|DP-LSGD)(?: \([\w-]+\))?, "
    r"(?:(?:Alg|Thm|App|eq)\. [\w–]+(?:\.\d+)?|§[\d.]*\d(?: \(\w+\))?|"
    r"(?:Lemma|Remark|Table|Definition|Figure)s? [\d–]+)"
    r"(?:, lines? [\d–]+)?"
)


@dataclass(frozen=True)
class Described:
    """An algorithm in words."""

    name: str
    rule: str
    citation: str
    parameters: dict[str, str]  # as Python has them, `clip: float = 1.0`, and what each means
    names: tuple[str, ...]


def described(method: Callable[..., object]) -> Described:
    """Name, rule, citation and parameters of an algorithm, from its docstring and signature."""
    text = inspect.cleandoc(method.__doc__ or "").partition(SECTION)[0]
    rule, _, rest = text.partition("\n\n")
    signature, said = inspect.signature(method), meanings(method)
    return Described(
        name=method.__name__,
        rule=" ".join(rule.split()),
        citation=" ".join(rest.split()),
        parameters={_shown(p): said.get(n, "") for n, p in signature.parameters.items()},
        names=tuple(signature.parameters),
    )


def _shown(parameter: inspect.Parameter) -> str:
    """`clip: float = 1.0`, as a function's source has it."""
    stars: dict[Any, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    text = f"{stars.get(parameter.kind, '')}{parameter.name}"
    if parameter.annotation is not parameter.empty:
        text = f"{text}: {_typed(parameter.annotation)}"
    given = parameter.default is not parameter.empty
    return f"{text} = {parameter.default!r}" if given else text


def _typed(annotation: Any) -> str:
    """A type by its short name.

    >>> _typed(float | Literal["probe"] | None)
    "float | Literal['probe'] | None"
    """
    if get_origin(annotation) in (Union, UnionType):
        return " | ".join(_typed(one) for one in get_args(annotation))
    if get_origin(annotation) is Literal:
        return f"Literal[{', '.join(repr(choice) for choice in get_args(annotation))}]"
    if annotation is NoneType:
        return "None"
    if isinstance(annotation, str):
        return annotation
    named = isinstance(annotation, type) and get_origin(annotation) is None
    return annotation.__name__ if named else inspect.formatannotation(annotation)


def found(package: Path) -> dict[str, list[tuple[str, str]]]:
    """For each work cited in the package: which part of it is built where, sorted."""
    works: dict[str, list[tuple[str, str]]] = {}
    for file in sorted(package.rglob("*.py")):
        lines = file.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, 1):
            for match in CITATION.finditer(line):
                work, _, part = match.group().partition(", ")
                place = _place(file.relative_to(package.parent), lines, number)
                works.setdefault(work.partition(" (")[0], []).append((part.strip(), place))
    return {work: sorted(set(places)) for work, places in sorted(works.items())}


def as_markdown(works: dict[str, list[tuple[str, str]]]) -> str:
    """docs/papers.md: the five papers first, then the other works."""
    lines = ["# Papers", "", "Generated from the citations in the code by `make docs`."]
    for work in [*PAPERS, *(other for other in works if other not in PAPERS)]:
        lines += ["", f"## {work}", ""]
        lines += [f"*{PAPERS[work]}*", ""] if work in PAPERS else []
        lines += [f"- {part}: {place}" for part, place in works.get(work, [])]
    return "\n".join(lines) + "\n"


def _place(file: Path, lines: list[str], number: int) -> str:
    """The file and the nearest name defined above a line."""
    for line in reversed(lines[:number]):
        if match := re.match(r"\s*(?:class|def) (\w+)", line):
            return f"`{match.group(1)}` in `{file.as_posix()}`"
    return f"`{file.as_posix()}`"


if __name__ == "__main__":
    print(as_markdown(found(Path(__file__).parents[1])), end="")

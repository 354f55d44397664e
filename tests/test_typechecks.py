"""The type checks of the tests refuse what they should."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float, Int32

from jaxthd.packing.segments import make_segments
from tests import typechecks
from tests.typechecks import checked

refused = functools.partial(pytest.raises, BeartypeCallHintViolation, match="test_typechecks|jaxthd")


@checked
def weighted(
    x_TC: Float[np.ndarray, "T C"], weights_T: Float[np.ndarray, " T"] | None = None, *, rows: int = 0
) -> Float[np.ndarray, " C"]:
    y_C = x_TC.sum(0) if weights_T is None else weights_T @ x_TC
    return y_C[rows:]


@checked
def joined(first: str, *others: str, **named: int) -> str:
    return first if "first" in others else 1  # type: ignore[return-value]


@checked
@dataclass(frozen=True)
class Row:
    ids_T: Int32[np.ndarray, " T"]
    positions_T: Int32[np.ndarray, " T"]


X = np.zeros((3, 2), np.float32)


def test_sizes_of_one_name_agree_in_arguments_and_result():
    assert weighted(X).shape == weighted(X, X[:, 0]).shape == (2,)
    with refused():
        weighted(X, X[0])
    with refused():
        weighted(X, weights_T=X[0])
    with refused():
        weighted(X.astype(int))
    with refused():
        weighted(X, rows=1)
    with refused():
        weighted(X, rows="0")
    assert weighted(X).shape == (2,)  # sizes of a call that failed are forgotten


@pytest.mark.parametrize("wrong", [((1,), {}), (("a", 1), {}), (("a",), {"b": "c"}), (("a", "b"), {"b": 1})])
def test_further_arguments_and_results_are_checked(wrong: tuple[tuple[Any, ...], dict[str, Any]]):
    assert joined("a", "first", b=1) == "a"
    args, kwargs = wrong
    with refused():
        joined(*args, **kwargs)


P = ParamSpec("P")


def test_arguments_that_are_handed_on_may_be_anything():
    @checked
    def called(call: Callable[P, int], *args: P.args, **kwargs: P.kwargs) -> int:
        return call(*args, **kwargs)

    assert called(int, "1", base=8) == 1
    with refused():
        called(str, 1)


def test_a_wrong_number_of_arguments_stays_pythons_error():
    with pytest.raises(TypeError, match="missing 1 required"):
        joined()


def test_dataclasses_are_checked():
    ids = np.zeros(3, np.int32)
    Row(ids, ids)
    with refused():
        Row(ids, positions_T=ids[1:])


def test_inner_functions_are_checked_as_their_annotations_say_each_time():
    def outer(kind: type) -> Callable[[Any], Any]:
        @checked
        def inner(x: kind) -> Iterator[kind]:  # type: ignore[valid-type]
            yield x

        return inner

    assert list(outer(int)(1)) == [1]
    assert list(outer(str)("a")) == ["a"]
    with refused():
        outer(int)("a")
    with refused():
        outer(str)(1)


def test_annotations_may_be_names():
    @checked
    def first(x: "Row", other: "list[Row]") -> "Row":
        return x

    row = Row(np.zeros(3, np.int32), np.zeros(3, np.int32))
    assert first(row, [row]) is row
    with refused():
        first(1, [row])
    with refused():
        first(row, [1])


def test_what_is_imported_is_checked_also_while_it_is_traced():
    with refused():
        jax.eval_shape(functools.partial(make_segments, block=4), jnp.zeros(8), jnp.zeros(8, jnp.int32))
    assert make_segments.__wrapped__.__code__.co_filename.endswith("segments.py")


def test_a_module_is_decorated_once_and_then_read(tmp_path, monkeypatch):
    (tmp_path / "sample.py").write_text(
        "import functools\n\n\n@functools.cache\ndef f(x: int) -> int:\n    def g(y: int): ...\n    g('a')\n"
    )
    source = str(tmp_path / "sample.py")

    def code() -> Any:
        return typechecks._Loader("sample", source, tmp_path).get_code("sample")

    first = code()
    monkeypatch.delattr(typechecks.ast, "parse")
    assert code() == first
    names: dict[str, Any] = {"_checked": checked}
    exec(first, names)
    with pytest.raises(BeartypeCallHintViolation, match="a"):
        names["f"](1)
    with pytest.raises(BeartypeCallHintViolation, match="an argument of"):
        names["f"]("a")
    assert names["f"].__wrapped__.__code__.co_name == "call"

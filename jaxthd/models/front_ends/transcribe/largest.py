"""The k largest of many numbers; of equal ones those that torch.topk chooses on the same platform.

A speaker cache that has been full holds some outputs for several speakers. Their scores are equal, and which
of them is chosen decides in which order they lie in the next cache. On a GPU torch chooses the first ones, as
jax does. On a CPU it chooses those that two functions of C++ leave among the first k: std::nth_element, and
std::partial_sort where the k are a 64th of the numbers or less. The standard does not say how these order
equal numbers: below are the algorithms of GNU's libstdc++, with which torch is built for Linux.

Legend: N numbers, of which the first `count` count.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int32

_RATIO = 64
"""Numbers for each of the k from which torch sorts them in part."""


def largest(x_N: Float[Array, " N"], count: Int32[Array, ""], k: int) -> Bool[Array, " N"]:
    """True for the k largest of the first `count` numbers, which are more than k. x: without NaN."""
    n = len(x_N)
    if k == 0:
        return jnp.zeros(n, bool)

    def chosen(index_k: Array) -> Array:
        return jnp.zeros(n, bool).at[index_k].set(True)

    def first() -> Array:
        return chosen(jax.lax.top_k(jnp.where(jnp.arange(n) < count, x_N, -jnp.inf), k)[1])

    def as_in_libstdcxx() -> Array:
        if _RATIO * k > n:
            return chosen(_nth_element(x_N, count, k))
        given = (_partial_sort, _nth_element)
        return chosen(jax.lax.cond(_RATIO * k <= count, *(lambda f=f: f(x_N, count, k) for f in given)))

    found: Array = jax.lax.platform_dependent(cpu=as_in_libstdcxx, default=first)
    return found


def _nth_element(x_N: Array, count: Array, k: int) -> Array:
    """The indices of the numbers in the first k places after std::nth_element(begin, begin + k - 1, end).

    Introselect: Hoare's partitions around the median of three numbers, until three places are left, which are
    sorted. (After 2 log2(N) partitions libstdc++ would go on with a heap; numbers for which that happens are
    made for it.)
    """
    n = len(x_N)
    place_N, never = jnp.arange(n, dtype=jnp.int32), jnp.int32(n)

    def partition(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """Orders the places from `first` to `last` around a pivot, and goes on in the part with place k."""
        order_N, first, last = state
        at = jnp.stack([first + 1, first + (last - first) // 2, last - 1])
        a, b, c = x_N[order_N[at]]
        median = jnp.where(
            a > b,
            jnp.where(b > c, at[1], jnp.where(a > c, at[2], at[0])),
            jnp.where(a > c, at[0], jnp.where(b > c, at[2], at[1])),
        )
        both = jnp.stack([first, median])
        order_N = order_N.at[both].set(order_N[both[::-1]])
        value_N, pivot = x_N[order_N], x_N[order_N[first]]
        # One scan goes up and stops at numbers that are not greater, one goes down and stops at those that
        # are not smaller. What they stop at is exchanged, until they meet.
        is_up_N = (place_N > first) & (place_N < last) & (value_N <= pivot)
        is_down_N = (place_N >= first) & (place_N < last) & (value_N >= pivot)
        up_N = _places(is_up_N, jnp.cumsum(is_up_N), never)
        down_N = _places(is_down_N, jnp.cumsum(is_down_N[::-1])[::-1], jnp.int32(-1))
        is_pair_N = up_N < down_N
        pairs = is_pair_N.sum()
        exchanged_N = order_N.at[jnp.where(is_pair_N, up_N, never)].set(order_N[down_N], mode="drop")
        exchanged_N = exchanged_N.at[jnp.where(is_pair_N, down_N, never)].set(order_N[up_N], mode="drop")
        last_down = jnp.where(pairs > 0, down_N[pairs - 1], never)
        cut = jnp.minimum(up_N[jnp.minimum(pairs, n - 1)], last_down)
        is_behind = cut < k
        return exchanged_N, jnp.where(is_behind, cut, first), jnp.where(is_behind, last, cut)

    start = place_N, jnp.int32(0), count.astype(jnp.int32)
    order_N, first, last = jax.lax.while_loop(lambda state: state[2] - state[1] > 3, partition, start)
    rest_3 = first + jnp.arange(3, dtype=jnp.int32)
    index_3 = order_N.at[rest_3].get(mode="clip")
    value_3 = jnp.where(rest_3 < last, x_N[index_3], -jnp.inf)
    sorted_3 = index_3[jnp.argsort(-value_3, stable=True)]
    return order_N.at[jnp.where(rest_3 < last, rest_3, never)].set(sorted_3, mode="drop")[:k]


def _places(is_stop_N: Array, number_N: Array, otherwise: Array) -> Array:
    """The places of stops in the order of their numbers, from 1 on; behind them `otherwise`."""
    n = len(is_stop_N)
    at_N = jnp.where(is_stop_N, number_N - 1, n)
    return jnp.full(n, otherwise).at[at_N].set(jnp.arange(n, dtype=jnp.int32), mode="drop")


def _partial_sort(x_N: Array, count: Array, k: int) -> Array:
    """The indices of the numbers in the first k places after std::partial_sort(begin, begin + k, end).

    A heap of the first k numbers, with the smallest on top; each later one that is greater takes its place.
    """

    def placed(heap_k: Array, top: Array, item: Array) -> Array:
        """The heap with an item below `top`, whose place is free: that moves down to the end, the item up."""

        def down(state: tuple[Array, Array]) -> tuple[Array, Array]:
            heap_k, hole = state
            right = 2 * hole + 2
            child = right - (x_N[heap_k[right]] > x_N[heap_k[right - 1]])
            return heap_k.at[hole].set(heap_k[child]), child

        def up(state: tuple[Array, Array]) -> tuple[Array, Array]:
            heap_k, hole = state
            parent = (hole - 1) // 2
            return heap_k.at[hole].set(heap_k[parent]), parent

        def rises(state: tuple[Array, Array]) -> Array:
            heap_k, hole = state
            return (hole > top) & (x_N[heap_k[(hole - 1) // 2]] > x_N[item])

        heap_k, hole = jax.lax.while_loop(lambda state: state[1] < (k - 1) // 2, down, (heap_k, top))
        if k % 2 == 0:  # the last item has no sibling
            is_above = hole == (k - 2) // 2
            heap_k = heap_k.at[jnp.where(is_above, hole, k)].set(heap_k[k - 1], mode="drop")
            hole = jnp.where(is_above, k - 1, hole)
        heap_k, hole = jax.lax.while_loop(rises, up, (heap_k, hole))
        return heap_k.at[hole].set(item)

    def made(number: Array, heap_k: Array) -> Array:
        top = (k - 2) // 2 - number
        return placed(heap_k, top, heap_k[top])

    def greater(heap_k: Array, after: Array) -> Array:
        """The first number behind `after` that is greater than the top; N without one."""
        index_N = jnp.arange(len(x_N), dtype=jnp.int32)
        is_greater_N = (index_N > after) & (index_N < count) & (x_N > x_N[heap_k[0]])
        return jnp.where(is_greater_N, index_N, len(x_N)).min()

    def taken(state: tuple[Array, Array]) -> tuple[Array, Array]:
        heap_k, item = state
        heap_k = placed(heap_k, jnp.int32(0), item)
        return heap_k, greater(heap_k, item)

    heap_k = jax.lax.fori_loop(0, k // 2, made, jnp.arange(k, dtype=jnp.int32))
    start = heap_k, greater(heap_k, jnp.int32(k - 1))
    return jax.lax.while_loop(lambda state: state[1] < len(x_N), taken, start)[0]

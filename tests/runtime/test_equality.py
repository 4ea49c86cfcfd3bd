"""A budget changes no bit: losses, gradients, parameters, buffers, optimizer state and random state are those of plain
PyTorch, for every model of the zoo, at budgets down to the smallest that works."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial

import pytest
import torch

import legroom
from tests.harness import Snapshot, assert_same, run_plain, run_room, run_with
from tests.zoo import ZOO

MOST_STEPS = 8
# With the planner that users get; the other cases take the quick one, as the planner is not what is tested here.
THOROUGH = {("gpt_manual", 0.5), ("hf_llama", 0.25), ("lstm_cell", 0.0), ("mlp", 0.25), ("moe", 0.5), ("unet", 0.75)}

# One-time notice of a CPU without bfloat16 instructions, in the autocast case.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


# With the threads that users have; the ops of the others are small, and their time is mostly that of waking threads.
THREADED = {
    "mlp",
    "gpt_manual",
    "cnn",
    "unet",
    "lstm",
    "hf_bert",
    "hf_llama",
    "hf_vit",
    "custom_function",
    "checkpoint",
}


@pytest.fixture(autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    if hasattr(request.node, "callspec") and request.node.callspec.params["name"] not in THREADED:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _nothing_left_over() -> None:
    """Tensors of the last test in a reference cycle would count as memory of this one."""
    gc.collect()


# Cases of a model follow each other; digests of all models would be many objects for each measured step to look at.
@lru_cache(maxsize=4)
def plain(name: str, steps: int) -> list[Snapshot]:
    return run_plain(ZOO[name](), steps)


@cache
def limits(name: str) -> tuple[int, int]:
    """The smallest budget that works, and the peak with everything kept; of all steps where they differ."""
    case = ZOO[name]()
    model, optimizer = case.build()
    floor = peak = 0
    for index in range(1 if case.steady else MOST_STEPS):
        step = partial(case.step, model, optimizer, case.batch(index))
        trace = legroom.capture(step, model=model, optimizer=optimizer)
        floor, peak = max(floor, legroom.floor_bytes(trace)), max(peak, trace.peak_bytes)
    if not case.steady:
        floor += floor // 20  # which gradients stand from the step before differs from run to run
    return floor, peak


# A share of the way from floor to peak: percentages of the peak would lie below the floor of some models.
@pytest.mark.parametrize("share", [0.75, 0.5, 0.25, 0.0], ids=["75%", "50%", "25%", "floor"])
@pytest.mark.parametrize("name", ZOO)
def test_a_budget_changes_no_bit(name: str, share: float, request: pytest.FixtureRequest) -> None:
    if (name, share) in THOROUGH:
        request.getfixturevalue("default_planner")
    case = ZOO[name]()
    floor, peak = limits(name)
    budget = floor + int(share * (peak - floor))

    taken, report, _ = run_room(case, partial(legroom.fit, budget=budget), most_steps=MOST_STEPS)

    assert_same(plain(name, len(taken)), taken)
    assert report.budget_bytes == budget
    assert report.peak_bytes <= budget, f"peak {report.peak_bytes}, budget {budget}, floor {floor}, plain {peak}"
    assert report.steps == len(taken)
    if case.steady:
        assert report.planned_steps >= 3, f"{report.planned_steps} of {report.steps} planned: {report.fallbacks}"


@pytest.mark.parametrize("name", ZOO)
def test_the_zoo_is_deterministic(name: str) -> None:
    """What the test above rests on: plain runs repeat, and hooks that do nothing change nothing."""
    context = partial(torch.autograd.graph.saved_tensors_hooks, torch.Tensor.detach, lambda t: t)
    assert_same(plain(name, 3), run_with(ZOO[name](), 3, lambda model, optimizer: context))


@pytest.mark.parametrize("name", ZOO)
def test_data_comes_from_its_own_generator(name: str) -> None:
    case = ZOO[name]()
    assert case.name == name
    before = torch.get_rng_state()
    case.batch(4)
    assert torch.equal(before, torch.get_rng_state())


def test_a_difference_is_named() -> None:
    case = ZOO["mlp"]()

    def nudge(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], Nudge]:
        return Nudge(model).again

    with pytest.raises(AssertionError, match=r"step 1: parameter 4\.bias differs: torch\.float32 \(128,\)"):
        assert_same(run_plain(case, 3), run_with(case, 3, nudge))


class Nudge:
    """After the second step, moves one number by one unit in the last place."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.steps = model, 0

    def again(self) -> Nudge:
        return self

    def __enter__(self) -> None:
        self.steps += 1

    def __exit__(self, *_: object) -> None:
        if self.steps == 2:
            with torch.no_grad():
                number = self.model[4].bias[7]
                number.copy_(torch.nextafter(number, torch.tensor(1.0)))

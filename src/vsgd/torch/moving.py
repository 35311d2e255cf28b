"""Moving the parameters of a group: to θ + δ for a second gradient, and on to where the rule says."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vsgd.options import Options
from vsgd.rule import Neighbours
from vsgd.torch.averaging import begin
from vsgd.torch.dispatch import alike, is_like, mean_curvature, neighbours_of, shift_tensors, update_tensors
from vsgd.torch.evidence import OTHER_ROWS, Observed
from vsgd.torch.loops import Job
from vsgd.torch.update import Gradient, Scale
from vsgd.torch.window import (
    Window,
    by_rows,
    count_by_rows,
    look_again,
    new_state,
    open_window,
    put_back_state,
    put_back_theta,
)

Group = dict[str, Any]
States = dict[Tensor, dict[str, Tensor]]

NO_NEIGHBOURS = Neighbours(0.0, 0.0)


class Scratch(NamedTuple):
    """What is kept from step to step and not worth saving."""

    outliers: dict[Tensor, int | Tensor]
    """Coordinates that found the last minibatch unusual."""
    warm: set[Tensor]
    """Dense parameters whose averages are past the bootstrap."""
    saved: dict[Tensor, Tensor]
    """Memory for θ during a shift; fresh memory is slow to come by."""
    mean_curvature: dict[Tensor, Neighbours]


def new_scratch() -> Scratch:
    return Scratch({}, set(), {}, {})


class Place(NamedTuple):
    """Where a parameter was before it was shifted."""

    window: Window
    saved: Tensor


def options_of(group: Group) -> Options:
    options = group["options"]
    return options if isinstance(options, Options) else Options(**options)


def shift_group(
    group: Group,
    states: States,
    scratch: Scratch,
    observed: dict[Tensor, Observed],
    seeds: dict[Tensor, int],
    places: dict[Tensor, Place],
) -> None:
    """Move the parameters of a group from θ to θ + δ; `places` then says where they were."""
    options = options_of(group)
    jobs: dict[Tensor, Job] = {}
    windows: dict[Tensor, Window] = {}
    for parameter in group["params"]:
        if parameter in observed:
            evidence = observed[parameter]
            window = open_window(parameter, state_of(parameter, states, evidence, options), evidence.rows, options)
            saved = scratch.saved.get(parameter)
            if saved is None or saved.shape != window.theta.shape or not is_like(saved, window.theta):
                saved = scratch.saved[parameter] = torch.empty_like(window.theta, requires_grad=False)
            windows[parameter] = window
            jobs[parameter] = job_of(window, saved, evidence._replace(source=Gradient(evidence.source[0])))
    for together in alike(jobs):
        tables = [by_rows(states[parameter]) for parameter in together]
        shift_tensors(list(together.values()), tables, [seeds[parameter] for parameter in together], options)
        places.update({parameter: Place(windows[parameter], job.saved) for parameter, job in together.items()})
        for parameter in together:
            put_back_theta(windows[parameter], parameter, windows[parameter].theta)


def put_back(places: dict[Tensor, Place]) -> None:
    """From θ + δ to θ."""
    for parameter, place in places.items():
        put_back_theta(place.window, parameter, place.saved)


def update_group(
    group: Group, states: States, scratch: Scratch, observed: dict[Tensor, Observed], places: dict[Tensor, Place]
) -> None:
    """Let the rule move the parameters of a group, from where they were before any shift. Takes them from `places`."""
    options = options_of(group)
    windows: dict[Tensor, Window] = {}
    jobs: dict[Tensor, Job] = {}
    for parameter in group["params"]:
        if parameter in observed:
            evidence, place = observed[parameter], places.get(parameter)
            state = state_of(parameter, states, evidence, options)
            if place is None:
                window, saved = open_window(parameter, state, evidence.rows, options), None
            else:
                window, saved = look_again(place.window, parameter), place.saved
                if window.rows is not None and (evidence.rows is None or not torch.equal(window.rows, evidence.rows)):
                    raise RuntimeError(OTHER_ROWS)
                if window.rows is None and window.slots.seen is not state["seen"]:
                    # rows began to be counted apart after the shift
                    window = open_window(parameter, state, None, options)
            job = job_of(window, saved, evidence)
            if place is None and not options.neighbours:
                # averages that are just being started wait for a step that shows them the curvature too, unless they
                # can have that of their neighbours
                job = job._replace(count=job.count * (window.slots.seen >= options.bootstrap))
            windows[parameter], jobs[parameter] = window, job
    if not jobs:
        return
    scale = Scale(lr=float(group["lr"]), weight_decay=group["weight_decay"])
    for together in alike(jobs):
        neighbours = [neighbours_in(p, windows[p], job, scratch, options) for p, job in together.items()]
        outliers = update_tensors(list(together.values()), neighbours, scale, options)
        scratch.outliers.update(zip(together, outliers, strict=True))
        for parameter in together:
            window = windows[parameter]
            put_back_theta(window, parameter, window.theta)
            put_back_state(window, parameter, states[parameter])
            places.pop(parameter, None)
    samples = observed[next(reversed(jobs))].counts
    group["samples"] = float(samples.max()) if samples.numel() else group["samples"]


def state_of(parameter: Tensor, states: States, evidence: Observed, options: Options) -> dict[str, Tensor]:
    state = states[parameter]
    if not state:
        state.update(new_state(parameter, options, evidence.by_rows))
    elif evidence.by_rows:
        count_by_rows(state, parameter)
    if options.average_iterates and "iterate" not in state:
        begin(parameter, state)
    return state


def job_of(window: Window, saved: Tensor | None, evidence: Observed) -> Job:
    """Of a table with dense gradients, all rows have the same count."""
    if evidence.source[0].numel() != window.theta.numel():
        raise RuntimeError(OTHER_ROWS)
    rows = window.slots.seen.numel()
    count = evidence.counts if evidence.counts.numel() == rows else evidence.counts.expand(rows).contiguous()
    return Job(window.theta, saved, window.average, count, window.slots, evidence.source)


def neighbours_in(parameter: Tensor, window: Window, job: Job, scratch: Scratch, options: Options) -> Neighbours:
    """Mean curvatures are kept: they change only where a second gradient was seen, or rows come and go."""
    if not options.neighbours:
        return NO_NEIGHBOURS
    known = scratch.mean_curvature.pop(parameter, None)
    dense = window.rows is None and window.slots.seen.numel() == 1
    mean = known if known and dense else mean_curvature(job.slots)
    if dense and job.saved is None and parameter in scratch.warm:
        scratch.mean_curvature[parameter] = mean
    return neighbours_of(mean, job.slots.grad, job.theta, options)

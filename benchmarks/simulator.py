"""Measure the speed of the fused simulator relative to NumPy, on a third of the rows of Figure 6.

python benchmarks/simulator.py
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable

from vsgd_bench.figures.comparison import GROUPS
from vsgd_bench.figures.figure import Request, run_problems
from vsgd_bench.problems import ELEMENTARY
from vsgd_bench.simulate import draw_noise, powers_of_two, simulate_vectorized

RUNS, UPDATES, REPEATS = 100, 1024, 3


def seconds(task: Callable[[], object]) -> float:
    started = time.perf_counter()
    task()
    return time.perf_counter() - started


def main() -> None:
    checkpoints = powers_of_two(UPDATES)
    print(f"fused loop on all cores against NumPy vectorized over {RUNS} runs; {len(ELEMENTARY)} problems")
    print(f"{'algorithm':<20}{'n':>4}{'NumPy':>10}{'fused':>10}{'ratio':>8}")
    totals = {"numpy": 0.0, "fused": 0.0}
    for algorithms in GROUPS.values():
        algorithm = algorithms[0]
        run_problems(ELEMENTARY[:1], algorithm, 1, Request(runs=1, updates=2))  # compile
        for n in (1, 10):
            request = Request(runs=RUNS, updates=UPDATES)

            def vectorized(algorithm=algorithm, n=n):
                noise = draw_noise(0, range(RUNS), UPDATES, n)
                for problem in ELEMENTARY:
                    simulate_vectorized(problem, algorithm, noise, checkpoints)

            def fused(algorithm=algorithm, n=n, request=request):
                run_problems(ELEMENTARY, algorithm, n, request)

            slow, fast = seconds(vectorized), seconds(fused)
            totals["numpy"] += slow
            totals["fused"] += fast
            print(f"{algorithm.name:<20}{n:>4}{slow:>9.2f}s{fast:>9.3f}s{slow / fast:>7.1f}x")
    print(f"{'all':<24}{totals['numpy']:>9.2f}s{totals['fused']:>9.3f}s{totals['numpy'] / totals['fused']:>7.1f}x")

    print("\ncost of the fused loop when one thing doubles, vSGD-fd (2 is linear)")
    algorithm = GROUPS["vSGD-fd"][0]
    for what, small, large in [
        ("runs", (10, Request(100, 1024)), (10, Request(200, 1024))),
        ("updates", (10, Request(100, 1024)), (10, Request(100, 2048))),
        ("n", (50, Request(100, 512)), (100, Request(100, 512))),
    ]:
        ratios = []
        for _ in range(REPEATS):
            first, second = (seconds(lambda a=a: run_problems(ELEMENTARY, algorithm, *a)) for a in (small, large))
            ratios.append(second / first)
        print(f"  {what:<8} x{statistics.median(ratios):.2f}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"\npeak memory of this process: {peak:.0f} MB")


if __name__ == "__main__":
    main()

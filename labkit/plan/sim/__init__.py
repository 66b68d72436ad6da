"""The parts of the simulator: who asks, where it is served, what a step takes. `labkit.plan.simulate` is the door."""

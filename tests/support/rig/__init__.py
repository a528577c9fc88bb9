"""Rigs: a whole broker around simulated machines. Nothing is bought.

- `broker_rig.BrokerRig`: controllers, store, blobs and cloud in this process, in real time. Start here.
- `virtual_time.VirtualTimeRig`: the same in a loop whose waits take no time, at the daemon's intervals: for hours.
- `tests.sim.world.World`: 1 to 3 brokers in virtual time; a seed draws faults, invariants judge: for interleavings.
- `tests.crash.daemon_rig.DaemonRig`: real daemons behind proxies, ended by SIGKILL: for what a crash leaves.
- `tests.crash.daemon.Daemon`: `gpubroker serve` with the simulated market over real processes of this host.

Clouds: `simulated_cloud.SimulatedCloud` and its subclasses sell virtual machines inside the broker's process.
`tests.crash.loopback_cloud` is an HTTP server of its own, because it must outlive the daemons that buy there.
`tests.conformance.emulated_clouds` runs the real providers against emulators of the clouds' APIs.
"""

"""gpubroker's plugin for the SkyPilot API server: the package `gpubroker_skypilot` of SkyPilot's own environment.

`providers.skypilot.plugin_wheel` packs this folder. Its modules import each other by relative names, and
import no other module of gpubroker. The daemon imports the modules that need no SkyPilot: `shared`, `launch_locks`,
`ssh`.
"""

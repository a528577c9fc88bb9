"""The gpubroker daemon: decides, buys, watches and settles; talks to clouds only through its ports."""

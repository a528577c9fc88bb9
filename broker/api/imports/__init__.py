"""Imports of data sets by the daemon: the client for the Hub and for allowed hosts, and the use case."""

"""Modules of one transformer layer, as operations on the tape."""

"""The gRPC API: conversion of messages (`codec`), authentication (`interceptor`), one servicer module per resource."""

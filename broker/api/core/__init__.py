"""Authentication, problems, paging, metrics and limits shared by HTTP and gRPC."""

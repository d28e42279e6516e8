"""The faces: OpenAI's HTTP and gRPC, one front behind both."""

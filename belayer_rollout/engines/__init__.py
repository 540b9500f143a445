"""Engines behind one protocol, `EngineWorker`: HTTP servers, vLLM in this process, transformers."""

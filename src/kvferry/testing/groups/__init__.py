"""The engine suite's groups of tests, one module each; `kvferry.testing.suite` puts them together."""

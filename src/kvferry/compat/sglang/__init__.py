"""SGLang, unmodified: `--disaggregation-transfer-backend kvferry`, through its entry point group for plug-ins.

`plugin` registers the backend; `layouts` translates SGLang's KVArgs into a layout; `manager`, `sender`, `receiver` and
`server` are what its schedulers call, over kvferry's own classes.
"""

"""The Ray-free controller: dispatcher, task store, client events, recorder, catalog service, pool plan."""

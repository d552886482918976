// The planner in MicroPython. Its files are in this script, because a page cannot read other files.
const planner = (() => {
  const FACTS = "FACTS";
  async function unpacked(text, type) {
    const packed = new Blob([Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0))]);
    const stream = packed.stream().pipeThrough(new DecompressionStream("gzip"));
    return URL.createObjectURL(new Blob([await new Response(stream).arrayBuffer()], { type }));
  }
  const start = async () => {
    const module = await import(await unpacked("mjs", "text/javascript"));
    const url = await unpacked("wasm", "application/wasm");
    const python = await module.loadMicroPython({ url, heapsize: 2 ** 26 });
    python.globals.set("FACTS_TEXT", JSON.stringify(FACTS));
    python.runPython("source");
    return (fields) => JSON.parse(python.globals.get("plan")(JSON.stringify(fields)));
  };
  return { FACTS, layouts: start() };
})();

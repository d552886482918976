// The planner in MicroPython. This script has all files, because a page cannot read other files.
const planner = (() => {
  const unpacked = (text) => {
    const packed = new Blob([Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0))]);
    return new Response(packed.stream().pipeThrough(new DecompressionStream("gzip")));
  };
  const address = async (text, type) =>
    URL.createObjectURL(new Blob([await unpacked(text).arrayBuffer()], { type }));
  const start = async () => {
    const { loadMicroPython } = await import(await address("mjs", "text/javascript"));
    const url = await address("wasm", "application/wasm");
    const python = await loadMicroPython({ url, heapsize: 2 ** 26 });
    const files = await unpacked("files").json();
    for (const name in files) python.FS.writeFile(name, files[name]);
    python.pyimport("prelude");
    const { plan } = python.pyimport("form_model");
    return (fields) => JSON.parse(plan(JSON.stringify(fields)));
  };
  return { FACTS: "facts", layouts: start() };
})();

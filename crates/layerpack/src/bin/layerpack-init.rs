//! The first process of a sandbox, as a program of its own: next to nothing has to be loaded before
//! it can begin, and little stays in memory for each sandbox. Where it does not lie beside
//! `layerpack`, that does its work.

fn main() {
    layerpack_runtime::init_main()
}

//! PID 1 for the tests: what a program that uses the crate does first.
fn main() {
    layerpack_runtime::init_main();
}

//! PID 1 of a sandbox.

/// The name under which a program must call [`init_main`] at once.
pub const INIT_ARG0: &str = "layerpack-init";

/// Runs the calling process as PID 1 of a sandbox and never returns.
pub fn init_main() -> ! {
    std::process::exit(125)
}

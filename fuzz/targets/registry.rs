//! See `layerpack_fuzz::TARGETS`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Some(target) = layerpack_fuzz::find("registry") {
        (target.run)(bytes);
    }
});

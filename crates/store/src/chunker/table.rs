//! The gear table of `gear64-v1`: the first 256 outputs of SplitMix64 from the seed `SEED`.

/// ASCII "layerpac" as a big-endian number.
const SEED: u64 = 0x6c61_7965_7270_6163;

/// Frozen: a golden test holds its digest.
pub(crate) static GEAR: [u64; 256] = generate();

#[expect(
    clippy::indexing_slicing,
    reason = "evaluated by the compiler, which checks the bounds"
)]
const fn generate() -> [u64; 256] {
    let mut table = [0; 256];
    let mut state = SEED;
    let mut i = 0;
    while i < 256 {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        table[i] = z ^ (z >> 31);
        i += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::GEAR;

    /// Values from an independent implementation in another language.
    #[test]
    fn table_is_frozen() {
        assert_eq!(
            GEAR[..3],
            [
                0x55e5_18ba_e3ac_22dd,
                0xb702_ff00_530b_288a,
                0xdeb9_a628_abf4_ec3f
            ]
        );
        assert_eq!(GEAR[255], 0x6980_0785_30bb_8c57);
        assert_eq!(GEAR.iter().fold(0, |a, g| a ^ g), 0x6ed6_4969_40f1_b893);
        assert_eq!(
            GEAR.iter().fold(0_u64, |a, g| a.wrapping_add(*g)),
            0x8f73_9e9e_ed58_7969
        );
    }
}

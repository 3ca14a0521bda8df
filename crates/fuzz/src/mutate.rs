//! A plain mutator: what libFuzzer does without looking at coverage.

use layerpack_fixtures::rng::Rng;

/// Longest result in bytes.
const LONGEST: usize = 1 << 20;
/// Values at which readers change their mind.
const EDGES: [u64; 14] = [
    0,
    1,
    2,
    0x7f,
    0x80,
    0xff,
    0x7fff,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    1 << 40,
    u64::MAX >> 1,
    u64::MAX,
];

/// One of the inputs, changed in one to eight places, or mixed with another. The same for the same
/// state of `rng`.
#[must_use]
pub fn mutate(rng: &mut Rng, inputs: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = rng.pick(inputs).cloned().unwrap_or_default();
    for _ in 0..=rng.below(8) {
        change(rng, &mut bytes, inputs);
    }
    bytes.truncate(LONGEST);
    bytes
}

fn change(rng: &mut Rng, bytes: &mut Vec<u8>, inputs: &[Vec<u8>]) {
    let at = rng.below_usize(bytes.len() + 1);
    let span = 1 + rng.below_usize(64);
    match rng.below(9) {
        0 => {
            let bit = rng.below(8);
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= 1 << bit;
            }
        }
        1 => {
            let value = rng.next_u64().to_le_bytes();
            if let (Some(byte), Some(value)) = (bytes.get_mut(at), value.first()) {
                *byte = *value;
            }
        }
        2 => {
            let value = rng.pick(&EDGES).copied().unwrap_or_default();
            let value = if rng.one_in(2) {
                value.to_le_bytes()
            } else {
                value.rotate_left(32).to_be_bytes()
            };
            let width = 1 << rng.below(4);
            overwrite(bytes, at, value.get(..width).unwrap_or_default());
        }
        3 => {
            let end = (at + span).min(bytes.len());
            bytes.drain(at..end);
        }
        4 => {
            let new = rng.bytes(span);
            bytes.splice(at..at, new);
        }
        5 => {
            let end = (at + span).min(bytes.len());
            let copy = bytes.get(at..end).unwrap_or_default().to_vec();
            let to = rng.below_usize(bytes.len() + 1);
            bytes.splice(to..to, copy);
        }
        6 => bytes.truncate(at),
        7 => {
            // Digits, which many formats write their numbers in.
            let digit = b'0'.wrapping_add(u8::try_from(rng.below(10)).unwrap_or_default());
            let digits = bytes.iter().filter(|byte| byte.is_ascii_digit()).count();
            let nth = rng.below_usize(digits);
            let mut found = bytes.iter_mut().filter(|byte| byte.is_ascii_digit());
            if let Some(byte) = found.nth(nth) {
                *byte = digit;
            }
        }
        _ => {
            let other = rng.pick(inputs).cloned().unwrap_or_default();
            let from = rng.below_usize(other.len() + 1);
            let tail = other.get(from..).unwrap_or_default();
            bytes.truncate(at);
            bytes.extend_from_slice(tail);
        }
    }
}

fn overwrite(bytes: &mut [u8], at: usize, value: &[u8]) {
    for (slot, byte) in bytes.iter_mut().skip(at).zip(value) {
        *slot = *byte;
    }
}

//! `layerpack diff`, `du`, `cat` and `find`: what is in layers, without mounting them.

mod cat;
mod diff;
mod du;
mod find;

use layerpack_packer::View;
use layerpack_store::{Digest, LayerStore, Manifest};
use serde::Serialize;

pub(super) use cat::cat;
pub(super) use diff::{diff, show as show_difference};
pub(super) use du::du;
pub(super) use find::find;

use crate::stack::{self, parse_reference};

/// A path in `-o json`: as text, and byte for byte where it is not UTF-8.
#[derive(Debug, Serialize)]
struct PathText {
    /// From the root, with a leading `/`; what is not UTF-8 is replaced.
    path: String,
    /// The same in hexadecimal, only if it is not UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    path_hex: Option<String>,
}

impl PathText {
    fn new(path: &[u8]) -> Self {
        let mut whole = b"/".to_vec();
        whole.extend_from_slice(path);
        match String::from_utf8(whole) {
            Ok(path) => Self {
                path,
                path_hex: None,
            },
            Err(error) => {
                let bytes = error.into_bytes();
                Self {
                    path: String::from_utf8_lossy(&bytes).into_owned(),
                    path_hex: Some(bytes.iter().map(|b| format!("{b:02x}")).collect()),
                }
            }
        }
    }
}

/// What a stack shows; `alone`: without the layers that a leading diff was made on.
fn open(store: &LayerStore, refs: &[String], alone: bool) -> anyhow::Result<View> {
    let layers: Vec<(Digest, Manifest)> = if alone {
        refs.iter()
            .map(|text| Ok(store.load(&parse_reference(text)?)?))
            .collect::<anyhow::Result<_>>()?
    } else {
        stack::resolve(store, refs)?
            .into_iter()
            .map(|layer| (layer.digest, layer.manifest))
            .collect()
    };
    Ok(View::open(store, &layers)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_lossless() {
        let plain = PathText::new("etc/é\n".as_bytes());
        assert_eq!(plain.path, "/etc/é\n");
        assert_eq!(plain.path_hex, None);
        assert_eq!(PathText::new(b"").path, "/");
        let odd = PathText::new(b"a\xff");
        assert_eq!(odd.path_hex.as_deref(), Some("2f61ff"));
    }
}

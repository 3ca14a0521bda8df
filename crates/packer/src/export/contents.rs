//! Contents of files from the store, read ahead in the order in which they will be asked for.

use std::collections::HashMap;

use layerpack_store::{Digest, LayerMap, LayerStore, Locator, Manifest};

use crate::error::{PackError, Result};

/// Bytes of chunks in memory.
const WINDOW: u64 = 8 << 20;

/// Chunks of some layers.
pub(crate) struct Contents {
    store: LayerStore,
    layers: Vec<(LayerMap, Locator)>,
    /// Layer and extent that has a chunk.
    places: HashMap<Digest, (usize, usize)>,
    /// Chunks in the order in which they are wanted, and how many were.
    order: Vec<(Digest, u32)>,
    next: usize,
    window: HashMap<Digest, Vec<u8>>,
}

impl Contents {
    /// Chunks of these layers.
    pub(crate) fn new<'a>(
        store: &LayerStore,
        manifests: impl IntoIterator<Item = &'a Manifest>,
    ) -> Result<Self> {
        let mut layers = Vec::new();
        let mut places = HashMap::new();
        for manifest in manifests {
            let map = store.map(manifest)?;
            let locator = store.locator(manifest, &map)?;
            for (index, extent) in map.extents().iter().enumerate() {
                places.entry(extent.digest).or_insert((layers.len(), index));
            }
            layers.push((map, locator));
        }
        Ok(Self {
            store: store.clone(),
            layers,
            places,
            order: Vec::new(),
            next: 0,
            window: HashMap::new(),
        })
    }

    /// Tells which chunk will be asked for after those told before.
    pub(crate) fn expect(&mut self, digest: Digest, len: u32) {
        self.order.push((digest, len));
    }

    /// The next chunk, which must be the one expected.
    pub(crate) fn get(&mut self, digest: &Digest) -> Result<&[u8]> {
        if !self.window.contains_key(digest) {
            self.fill()?;
        }
        self.next += 1;
        self.window.get(digest).map(Vec::as_slice).ok_or_else(|| {
            PackError::unsupported(b"", format!("chunk {digest} is not in the layer's map"))
        })
    }

    /// A chunk by itself, whatever was expected.
    pub(crate) fn one(&self, digest: &Digest) -> Result<Vec<u8>> {
        let missing =
            || PackError::unsupported(b"", format!("chunk {digest} is not in the layer's map"));
        let (layer, extent) = self.places.get(digest).ok_or_else(missing)?;
        let (map, locator) = self.layers.get(*layer).ok_or_else(missing)?;
        let mut found = None;
        self.store
            .read_chunks(map, locator, &[*extent], &mut |_, bytes| {
                found = Some(bytes.to_vec());
                Ok(())
            })?;
        found.ok_or_else(missing)
    }

    fn fill(&mut self) -> Result<()> {
        self.window.clear();
        let mut wanted: Vec<Vec<usize>> = vec![Vec::new(); self.layers.len()];
        let mut bytes = 0;
        for (digest, len) in self.order.iter().skip(self.next) {
            if bytes > 0 && bytes + u64::from(*len) > WINDOW {
                break;
            }
            bytes += u64::from(*len);
            if let Some((layer, extent)) = self.places.get(digest)
                && let Some(wanted) = wanted.get_mut(*layer)
            {
                wanted.push(*extent);
            }
        }
        for ((map, locator), extents) in self.layers.iter().zip(&wanted) {
            let window = &mut self.window;
            self.store
                .read_chunks(map, locator, extents, &mut |index, bytes| {
                    if let Some(extent) = map.extents().get(index) {
                        window.insert(extent.digest, bytes.to_vec());
                    }
                    Ok(())
                })?;
        }
        Ok(())
    }
}

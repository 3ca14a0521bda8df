//! Merged layers against what the kernel's overlay shows of the layers that they came from.

use layerpack_fixtures::rng::Rng;
use layerpack_fixtures::treecmp::Options;
use layerpack_fixtures::{ScratchDir, skip};

use crate::merge::{pack, random_layer, try_merge};
use crate::privileged_kernel::{assert_same_trees, stack, unable};
use crate::support::memory_store;

#[test]
fn privileged_a_merge_shows_what_the_overlay_of_its_layers_shows() {
    if let Some(reason) = unable() {
        skip!("{reason}");
    }
    // overlayfs counts the links that the lower file has, whether their names show or not. A
    // toolkit's root is implicit, so the kernel alone would show its placeholder.
    let options = Options {
        links: false,
        ..Options::default().without_root()
    };
    for seed in 0..25 {
        let mut rng = Rng::new(1000 + seed);
        let store = memory_store();
        let names = ["base/l:0", "toolkit/l:1", "toolkit/l:2", "toolkit/l:3"];
        let layers: Vec<_> = (0u64..)
            .zip(names)
            .map(|(number, name)| pack(&store, name, random_layer(&mut rng, number, number > 0)))
            .collect();
        let scratch = ScratchDir::new("merge").unwrap();
        let all: Vec<_> = layers.iter().collect();
        let overlay = stack(&all, &scratch, "overlay", None);

        let flat = try_merge(&store, "base/m:1", &names).unwrap();
        let flat = stack(&[&flat], &scratch, "flat", None);
        assert_same_trees(&overlay.merged, &flat.merged, &options);

        let middle = try_merge(&store, "toolkit/m:1", &names[1..3]).unwrap();
        let middle = stack(&[&layers[0], &middle, &layers[3]], &scratch, "middle", None);
        assert_same_trees(&overlay.merged, &middle.merged, &options);
    }
}

//! Names that move.

use layerpack_store::channel::{ChannelName, MAX_HISTORY};
use layerpack_store::{Key, PutMode, StoreError, Version};

use crate::support::{memory, noise, publish, reference};

fn name(text: &str) -> ChannelName {
    text.parse().unwrap()
}

#[test]
fn names_of_channels() {
    let channel = name("workspace/a/b@latest");
    assert_eq!(channel.to_string(), "workspace/a/b@latest");
    let key = Key::channel(&channel);
    assert_eq!(key.as_str(), "channels/workspace/a/b/_latest");
    assert_eq!(key.to_channel(), Some(channel));
    for bad in [
        "",
        "workspace/a:1",
        "workspace@x",
        "x/a@b",
        "base/a@",
        "base/a@.b",
        "base/a@b/c",
        "base/A@b",
    ] {
        assert!(bad.parse::<ChannelName>().is_err(), "{bad}");
    }
    assert_eq!(Key::new("channels/base/a/b").unwrap().to_channel(), None);
}

#[test]
fn a_channel_moves_and_remembers() {
    let (blobs, store) = memory();
    let latest = name("base/a@latest");
    for error in [
        store.resolve_channel(&latest).unwrap_err(),
        store.remove_channel(&latest).unwrap_err(),
        store.resolve(&reference("base/a:1")).unwrap_err(),
        store.remove(&reference("base/a:1")).unwrap_err(),
    ] {
        assert!(matches!(error, StoreError::NoStore { .. }), "{error:?}");
    }
    publish(&store, "base/other:1", &[noise(1, 100)]).unwrap();
    for error in [
        store.resolve_channel(&latest).unwrap_err(),
        store.remove_channel(&latest).unwrap_err(),
    ] {
        assert!(
            matches!(error, StoreError::UnknownChannel { .. }),
            "{error:?}"
        );
    }
    let version = |i: u64| Version::new(&i.to_string()).unwrap();
    for i in 0..MAX_HISTORY as u64 + 3 {
        publish(&store, &format!("base/a:{i}"), &[noise(i, 100)]).unwrap();
        store.move_channel(&latest, &version(i), 1000 + i).unwrap();
        store.move_channel(&latest, &version(i), 9999).unwrap(); // stays
        assert_eq!(
            store.resolve_channel(&latest).unwrap(),
            reference(&format!("base/a:{i}"))
        );
    }
    let channel = store.channel(&latest).unwrap().unwrap();
    assert_eq!(channel.history.len(), MAX_HISTORY);
    assert_eq!(channel.current.moved, 1000 + MAX_HISTORY as u64 + 2);
    assert_eq!(channel.history[0].version, version(MAX_HISTORY as u64 + 1));
    // Only to what is published.
    assert!(matches!(
        store.move_channel(&latest, &version(999), 1).unwrap_err(),
        StoreError::UnknownReference { .. }
    ));
    // A version that is gone, or is another now.
    let last = reference(&format!("base/a:{}", MAX_HISTORY + 2));
    store.remove(&last).unwrap();
    let error = store.resolve_channel(&latest).unwrap_err();
    assert!(error.to_string().contains("no longer published"), "{error}");
    publish(&store, &last.to_string(), &[noise(77, 100)]).unwrap();
    let error = store.resolve_channel(&latest).unwrap_err();
    assert!(error.to_string().contains("other content"), "{error}");

    // Damage is told, does not hide others, and is mended by moving.
    store
        .move_channel(&name("base/a@b"), &version(1), 1)
        .unwrap();
    let key = Key::channel(&latest);
    for bad in [&b"{"[..], b"{\"format\":2}", &[b' '; 70_000]] {
        blobs.put(&key, bad, PutMode::Overwrite).unwrap();
        let error = store.resolve_channel(&latest).unwrap_err();
        assert!(error.is_damage(), "{error}");
        assert_eq!(store.channels().unwrap().len(), 2);
    }
    store.move_channel(&latest, &version(1), 5).unwrap();
    assert!(store.channels().unwrap().iter().all(|c| c.channel.is_ok()));
    store.remove_channel(&latest).unwrap();
    assert!(store.remove_channel(&latest).is_err());
    assert_eq!(store.channels().unwrap().len(), 1);
}

//! Stores behind a web server.

use std::sync::Arc;

use layerpack_fixtures::ScratchDir;
use layerpack_fixtures::servers::Nginx;
use layerpack_store::blob::contract;
use layerpack_store::{
    BlobStore, BlobWriter, FileStore, LayerStore, ObjectInfo, PutMode, PutOutcome, Result,
    StoreError, open_url,
};

use crate::layers::{data_of, publish, read_all, sample};
use crate::support::key;

/// Reads over the web, writes into the directory that is served: so the whole contract is asked
/// of a backend that only reads.
#[derive(Debug)]
struct Served {
    web: Arc<dyn BlobStore>,
    files: FileStore,
}

impl BlobStore for Served {
    fn get(&self, key: &layerpack_store::Key, max_len: u64) -> Result<Option<Vec<u8>>> {
        self.web.get(key, max_len)
    }

    fn get_range(
        &self,
        key: &layerpack_store::Key,
        range: std::ops::Range<u64>,
    ) -> Result<Vec<u8>> {
        self.web.get_range(key, range)
    }

    fn put(&self, key: &layerpack_store::Key, bytes: &[u8], mode: PutMode) -> Result<PutOutcome> {
        self.files.put(key, bytes, mode)
    }

    fn put_stream(&self) -> Result<Box<dyn BlobWriter + '_>> {
        self.files.put_stream()
    }

    fn size(&self, key: &layerpack_store::Key) -> Result<Option<u64>> {
        self.web.size(key)
    }

    fn list(&self, prefix: &str) -> Result<Vec<ObjectInfo>> {
        self.files.list(prefix)
    }

    fn delete(&self, key: &layerpack_store::Key) -> Result<bool> {
        self.files.delete(key)
    }

    fn url(&self) -> String {
        self.web.url()
    }
}

fn nginx(dir: &ScratchDir) -> Option<Nginx> {
    Nginx::program()?;
    Some(Nginx::start(dir.path()).unwrap())
}

#[test]
fn contract_holds_for_reading() {
    let dir = ScratchDir::new("web").unwrap();
    let Some(server) = nginx(&dir) else {
        layerpack_fixtures::skip!("nginx is not installed");
    };
    contract::run(&|| {
        Arc::new(Served {
            web: open_url(&format!("{}/deep/er", server.url())).unwrap(),
            files: FileStore::new(dir.join("deep/er")).unwrap(),
        })
    })
    .unwrap();
}

#[test]
fn layers_are_read_and_nothing_is_written() {
    let dir = ScratchDir::new("web").unwrap();
    let Some(server) = nginx(&dir) else {
        layerpack_fixtures::skip!("nginx is not installed");
    };
    let files = sample(3);
    let local = LayerStore::new(Arc::new(FileStore::new(dir.join("store")).unwrap()));
    publish(&local, "base/x:1", &files).unwrap();

    let store = LayerStore::new(open_url(&format!("{}/store", server.url())).unwrap());
    assert_eq!(read_all(&store, "base/x:1").unwrap(), data_of(&files));
    let unknown = store.load(&"base/y:1".parse().unwrap()).unwrap_err();
    assert!(matches!(unknown, StoreError::UnknownReference { .. }));

    let blobs = store.blobs();
    let errors = [
        blobs.list("").unwrap_err(),
        blobs.put(&key("a/b"), b"", PutMode::IfAbsent).unwrap_err(),
        blobs.delete(&key("a/b")).unwrap_err(),
        blobs.put_stream().err().unwrap(),
    ];
    for error in errors {
        assert!(
            matches!(error, StoreError::NotSupported { .. }),
            "{error:?}"
        );
        assert!(error.to_string().contains(&server.url()), "{error}");
    }
}

/// Behind a web server the marker alone tells whether there is a store.
#[test]
fn an_address_of_the_web_without_a_store_is_passed_over() {
    let dir = ScratchDir::new("web-none").unwrap();
    let Some(server) = nginx(&dir) else {
        layerpack_fixtures::skip!("nginx is not installed");
    };
    let files = sample(3);
    let path = dir.join("store");
    let local = LayerStore::new(Arc::new(FileStore::new(&path).unwrap()));
    publish(&local, "base/x:1", &files).unwrap();
    let (web, local) = (server.url(), path.display());

    for (address, listed) in [
        (format!("{web}/none,{web}/store"), false),
        (format!("{web}/none,file://{local}"), true),
        (format!("file://{local}-none,{web}/store"), false),
    ] {
        let store = LayerStore::new(open_url(&address).unwrap());
        assert_eq!(
            read_all(&store, "base/x:1").unwrap(),
            data_of(&files),
            "{address}"
        );
        let unknown = store.load(&"base/y:1".parse().unwrap()).unwrap_err();
        assert!(
            matches!(unknown, StoreError::UnknownReference { .. }),
            "{address}: {unknown:?}"
        );
        assert_eq!(store.blobs().passed_over().len(), 1, "{address}");
        assert_eq!(store.list().is_ok(), listed, "{address}");
        let error = publish(&store, "base/y:1", &files).map(drop).unwrap_err();
        assert!(error.to_string().contains("is no store"), "{error}");
    }
    assert!(!dir.join("store-none").exists());
    let nowhere = LayerStore::new(open_url(&format!("{web}/none")).unwrap());
    let error = nowhere.load(&"base/x:1".parse().unwrap()).unwrap_err();
    assert!(matches!(error, StoreError::NoStore { .. }), "{error:?}");
}

//! Key files, and signing what was published.

use std::io::{Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use layerpack_store::{Digest, LayerStore, PublicKey, SigningKey};

use crate::args::SignWithArgs;
use crate::failure::usage;

/// Largest key file in bytes.
const MAX_KEY_FILE: u64 = 64 << 10;

/// Signs what a command publishes, if it is to.
#[derive(Debug)]
pub(crate) struct Signer(Option<SigningKey>);

impl Signer {
    /// Reads the key, before the work begins.
    pub(crate) fn new(args: &SignWithArgs) -> anyhow::Result<Self> {
        args.sign.as_deref().map(secret).transpose().map(Self)
    }

    /// Signs a manifest that was just published.
    pub(crate) fn sign(&self, store: &LayerStore, manifest: &Digest) -> anyhow::Result<()> {
        if let Some(key) = &self.0 {
            store.sign(manifest, key).with_context(|| {
                format!("{manifest} is published but not signed: run `layerpack sign`")
            })?;
        }
        Ok(())
    }
}

/// Reads a secret key; refuses one that others could have read or changed.
pub(crate) fn secret(path: &Path) -> anyhow::Result<SigningKey> {
    let file = fs_err::File::open(path)?;
    let meta = file.metadata()?;
    if !meta.is_file() || meta.len() > MAX_KEY_FILE {
        bail!("{} is no key file", path.display());
    }
    let text = std::io::read_to_string(file.take(MAX_KEY_FILE))
        .with_context(|| format!("{} is no key file", path.display()))?;
    if text.parse::<PublicKey>().is_ok() {
        return Err(usage(format!(
            "{} holds a public key, and a secret one is needed: name the file that `layerpack key generate` wrote beside it, without .pub",
            path.display()
        )));
    }
    let key =
        SigningKey::from_text(&text).with_context(|| format!("cannot use {}", path.display()))?;
    let caller = rustix::process::geteuid();
    if meta.mode() & 0o077 != 0 || (meta.uid() != caller.as_raw() && !caller.is_root()) {
        bail!(
            "the secret key {} can be used by others: give it to its user alone (chmod 600), or make a new one if it may have leaked",
            path.display()
        );
    }
    Ok(key)
}

/// The public key of a key file of either sort.
pub(crate) fn public(path: &Path) -> anyhow::Result<PublicKey> {
    let size = fs_err::metadata(path)?.len();
    if size > MAX_KEY_FILE {
        bail!("{} is no key file", path.display());
    }
    let text = fs_err::read_to_string(path)?;
    match text.parse() {
        Ok(key) => Ok(key),
        Err(_) => secret(path).map(|key| key.public()),
    }
}

/// The public keys that a command line names, each as text or by its key file.
pub(crate) fn trusted(texts: &[String]) -> anyhow::Result<Vec<PublicKey>> {
    let key = |text: &String| {
        if let Ok(key) = text.parse::<PublicKey>() {
            return Ok(key);
        }
        let path = Path::new(text);
        // What is no file may be a secret, and is not repeated.
        if !path.exists() {
            return Err(usage(
                "a key is neither a public key (ed25519: and 64 hex digits) nor a key file that is there; `layerpack key show FILE` shows a file's public key",
            ));
        }
        public(path)
    };
    texts.iter().map(key).collect()
}

/// Writes a new key and its public half beside it; neither file may exist.
pub(crate) fn generate(path: &Path) -> anyhow::Result<(PublicKey, PathBuf)> {
    let mut name = path.as_os_str().to_owned();
    name.push(".pub");
    let beside = PathBuf::from(name);
    if beside.symlink_metadata().is_ok() {
        bail!("{} exists: choose another name", beside.display());
    }
    let key = SigningKey::generate()?;
    create(path, 0o600, &key.to_text())?;
    if let Err(error) = create(&beside, 0o644, &format!("{}\n", key.public())) {
        let _ = fs_err::remove_file(path);
        return Err(error);
    }
    Ok((key.public(), beside))
}

fn create(path: &Path, mode: u32, text: &str) -> anyhow::Result<()> {
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(path)
        .with_context(|| format!("cannot create {}", path.display()))?;
    file.write_all(text.as_bytes())
        .and_then(|()| file.sync_all())
        .with_context(|| format!("cannot write {}", path.display()))
}

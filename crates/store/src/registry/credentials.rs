//! Who we are to a registry: the configuration files of docker (`config.json`) and of the
//! containers tools (`auth.json`), and the credential helpers that they name.
//!
//! For a registry the helper of `credHelpers` is asked first, then that of `credsStore`, then
//! `auths` is searched: the repository's own entry (`host/a/b`), then those of its parents, then
//! the host's. The first file that knows the registry is used. A helper is the program
//! `docker-credential-NAME get`: it reads the host from stdin and answers with JSON. It gets a time
//! limit, since one that waits for a key ring or a person would stop a build for ever.
//!
//! Secrets are never part of a message or of `Debug`.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;

use super::name::RegistryName;

/// Largest configuration file and largest answer of a helper, in bytes.
const MAX_CONFIG: u64 = 4 << 20;
/// The name that docker's own registry has in these files.
const HUB: &str = "https://index.docker.io/v1/";

/// What is shown to a registry or to its token server.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Credential {
    /// Name and password.
    Password { user: String, secret: String },
    /// A refresh token, for the token server only.
    Identity(String),
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Password { user, .. } => write!(f, "Password({user:?}, …)"),
            Self::Identity(_) => f.write_str("Identity(…)"),
        }
    }
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Config {
    auths: BTreeMap<String, Entry>,
    #[serde(rename = "credsStore")]
    store: Option<String>,
    #[serde(rename = "credHelpers")]
    helpers: BTreeMap<String, String>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Entry {
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
    #[serde(rename = "identitytoken")]
    identity: Option<String>,
}

#[derive(Deserialize)]
struct Answer {
    #[serde(rename = "Username")]
    user: String,
    #[serde(rename = "Secret")]
    secret: String,
}

/// The credential for a repository; `None`: no file knows the registry, so be anonymous. Files that
/// do not exist are passed over.
///
/// # Errors
/// In words: a file that cannot be read or understood, a helper that fails or does not end.
pub(super) fn find(
    files: &[PathBuf],
    name: &RegistryName,
    limit: Duration,
) -> Result<Option<Credential>, String> {
    for path in files {
        let Some(config) = load(path)? else { continue };
        let wrap = |what: String| format!("{what} (from {})", path.display());
        if let Some(found) = ask(&config, name, limit).map_err(wrap)? {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

fn load(path: &Path) -> Result<Option<Config>, String> {
    let file = match fs_err::File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(format!("cannot read the registry credentials: {e}")),
    };
    let mut bytes = Vec::new();
    file.take(MAX_CONFIG + 1)
        .read_to_end(&mut bytes)
        .map_err(|e| format!("cannot read the registry credentials: {e}"))?;
    if bytes.len() as u64 > MAX_CONFIG {
        return Err(format!(
            "{} has more than {MAX_CONFIG} bytes and is no configuration",
            path.display()
        ));
    }
    // Not the parser's message: it may quote a secret.
    serde_json::from_slice(&bytes).map(Some).map_err(|e| {
        format!(
            "{} is no configuration of registry credentials (line {}, column {})",
            path.display(),
            e.line(),
            e.column()
        )
    })
}

/// What the keys of a configuration may call the registry.
fn spellings(name: &RegistryName) -> Vec<String> {
    let host = name.host();
    if name.interface_host() == host {
        vec![host.to_owned()]
    } else {
        [HUB, "docker.io", "index.docker.io", host]
            .map(str::to_owned)
            .to_vec()
    }
}

fn ask(
    config: &Config,
    name: &RegistryName,
    limit: Duration,
) -> Result<Option<Credential>, String> {
    let spellings = spellings(name);
    for host in &spellings {
        if let Some(program) = config.helpers.get(host) {
            return helper(program, host, limit);
        }
    }
    if let (Some(program), Some(host)) = (
        config
            .store
            .as_deref()
            .filter(|program| !program.is_empty()),
        spellings.first(),
    ) && let Some(found) = helper(program, host, limit)?
    {
        return Ok(Some(found));
    }
    let Some(entry) = entry(config, name, &spellings) else {
        return Ok(None);
    };
    from_entry(entry)
}

/// The entry of the repository, of the nearest of its parents, or of the host.
fn entry<'a>(config: &'a Config, name: &RegistryName, spellings: &[String]) -> Option<&'a Entry> {
    let mut path = format!("{}/{}", name.host(), name.repository());
    loop {
        if let Some(found) = config.auths.get(&path) {
            return Some(found);
        }
        let (parent, _) = path.rsplit_once('/')?;
        if parent == name.host() {
            break;
        }
        path = parent.to_owned();
    }
    spellings
        .iter()
        .find_map(|host| config.auths.get(host))
        .or_else(|| {
            // Older files spell a host as an address.
            let (_, found) = config.auths.iter().find(|(key, _)| {
                let bare = key
                    .strip_prefix("https://")
                    .or_else(|| key.strip_prefix("http://"));
                let host = bare.and_then(|rest| rest.split('/').next());
                host == Some(name.host())
            })?;
            Some(found)
        })
}

fn from_entry(entry: &Entry) -> Result<Option<Credential>, String> {
    if let Some(token) = entry.identity.as_ref().filter(|token| !token.is_empty()) {
        return Ok(Some(Credential::Identity(token.clone())));
    }
    if let (Some(user), Some(secret)) = (&entry.username, &entry.password)
        && !user.is_empty()
    {
        return Ok(Some(Credential::Password {
            user: user.clone(),
            secret: secret.clone(),
        }));
    }
    let Some(auth) = entry.auth.as_ref().filter(|auth| !auth.is_empty()) else {
        // docker leaves empty entries beside a `credsStore`.
        return Ok(None);
    };
    let bad = || "its `auth` is not base64 of NAME:PASSWORD; log in again".to_owned();
    let bytes = BASE64_STANDARD.decode(auth.trim()).map_err(|_| bad())?;
    let text = String::from_utf8(bytes).map_err(|_| bad())?;
    let (user, secret) = text.split_once(':').ok_or_else(bad)?;
    Ok(Some(Credential::Password {
        user: user.to_owned(),
        secret: secret.trim_end_matches('\0').to_owned(),
    }))
}

/// Asks a credential helper; `None` if it knows nothing of the host.
fn helper(name: &str, host: &str, limit: Duration) -> Result<Option<Credential>, String> {
    let plain = name
        .bytes()
        .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
    if !plain || name.is_empty() || name.len() > 100 {
        return Err(format!(
            "the credential helper's name {:?} is not letters, digits, - _ and .",
            name.chars().take(100).collect::<String>()
        ));
    }
    let program = format!("docker-credential-{name}");
    let (ended, output) = run(&program, host, limit)?;
    if !ended {
        let text = String::from_utf8_lossy(&output);
        if text.contains("credentials not found") {
            return Ok(None);
        }
        // What a helper says of its failure holds no secret; an answer could.
        let said: String = text.chars().filter(|c| !c.is_control()).take(200).collect();
        return Err(format!("{program} failed for {host}: {said}"));
    }
    let answer: Answer = serde_json::from_slice(&output).map_err(|_| {
        format!("{program} answered for {host} with something else than credentials")
    })?;
    Ok(Some(if answer.user == "<token>" {
        Credential::Identity(answer.secret)
    } else {
        Credential::Password {
            user: answer.user,
            secret: answer.secret,
        }
    }))
}

/// Whether the program succeeded, and what it wrote to stdout.
fn run(program: &str, host: &str, limit: Duration) -> Result<(bool, Vec<u8>), String> {
    let fail = |what: &str, e: io::Error| format!("cannot {what} {program}: {e}");
    let mut child = Command::new(program)
        .arg("get")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|e| fail("run", e))?;
    // A helper that reads nothing has a pipe's room for so short a text.
    if let Some(mut stdin) = child.stdin.take() {
        let _ = stdin.write_all(host.as_bytes());
    }
    let (sender, receiver) = mpsc::channel();
    if let Some(stdout) = child.stdout.take() {
        // Ends when the pipe closes; if a grandchild keeps it open, nobody waits for it.
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let read = stdout.take(MAX_CONFIG + 1).read_to_end(&mut bytes);
            let _ = sender.send(read.map(|_| bytes));
        });
    }
    let deadline = Instant::now() + limit;
    let output = receiver.recv_timeout(limit);
    let mut pause = Duration::from_millis(1);
    let status = loop {
        match child.try_wait().map_err(|e| fail("wait for", e))? {
            Some(status) => break status,
            None if output.is_err() || Instant::now() >= deadline => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!(
                    "{program} did not answer for {host} within {} ms",
                    limit.as_millis()
                ));
            }
            None => std::thread::sleep(pause),
        }
        pause = (pause * 2).min(Duration::from_millis(50));
    };
    let output = match output {
        Ok(Ok(bytes)) if bytes.len() as u64 <= MAX_CONFIG => bytes,
        Ok(Ok(_)) => {
            return Err(format!(
                "{program} answered with more than {MAX_CONFIG} bytes"
            ));
        }
        Ok(Err(e)) => return Err(fail("read from", e)),
        Err(_) => {
            return Err(format!(
                "{program} ended, but something that it started keeps its output open"
            ));
        }
    };
    Ok((status.success(), output))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(config: &str, name: &str) -> Result<Option<Credential>, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        fs_err::write(&path, config).unwrap();
        let files = [dir.path().join("none"), path];
        find(&files, &name.parse().unwrap(), Duration::from_secs(10))
    }

    fn password(user: &str, secret: &str) -> Result<Option<Credential>, String> {
        Ok(Some(Credential::Password {
            user: user.to_owned(),
            secret: secret.to_owned(),
        }))
    }

    #[test]
    fn the_nearest_entry_counts() {
        // base64: u:p, w:q:r, hub:h
        let config = r#"{"auths":{
            "h.example":{"auth":"dTpw"},
            "h.example/a/b":{"auth":"dzpxOnI="},
            "https://old.example/v1/":{"username":"o","password":"x"},
            "i.example":{"identitytoken":"t","auth":"dTpw"},
            "empty.example":{},
            "https://index.docker.io/v1/":{"auth":"aHViOmg="}}}"#;
        assert_eq!(found(config, "h.example/x"), password("u", "p"));
        assert_eq!(found(config, "h.example/a"), password("u", "p"));
        assert_eq!(found(config, "h.example/a/b"), password("w", "q:r"));
        assert_eq!(found(config, "h.example/a/b/c/d"), password("w", "q:r"));
        assert_eq!(found(config, "old.example/x"), password("o", "x"));
        assert_eq!(found(config, "docker.io/debian"), password("hub", "h"));
        let identity = Ok(Some(Credential::Identity("t".to_owned())));
        assert_eq!(found(config, "i.example/x"), identity);
        for anonymous in [
            "empty.example/x",
            "h.example:1/x",
            "other.example/h.example",
        ] {
            assert_eq!(found(config, anonymous), Ok(None), "{anonymous}");
        }
    }

    #[test]
    fn damage_is_told_without_secrets() {
        for bad in [
            r#"{"auths":{"h":{"auth":"geheim"}}}"#,
            r#"{"auths":{"h":"geheim"}}"#,
            "geheim",
        ] {
            let error = found(bad, "h/x").unwrap_err();
            assert!(!error.contains("geheim"), "{error}");
            assert!(error.contains("config.json"), "{error}");
        }
        assert!(!format!("{:?}", password("u", "geheim")).contains("geheim"));
        let error = found(r#"{"credHelpers":{"h":"../x"}}"#, "h/x").unwrap_err();
        assert!(error.contains("../x"), "{error}");
        let error = found(r#"{"credsStore":"layerpack-none"}"#, "h/x").unwrap_err();
        assert!(
            error.contains("docker-credential-layerpack-none"),
            "{error}"
        );
    }
}

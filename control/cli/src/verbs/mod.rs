//! Verbs on objects: `addax volume …`, `addax disk …`, `addax node …`, `addax hugepages …`.

pub mod disk;
pub mod hugepages;
pub mod node;
mod recovery;
mod room;
pub mod volume;

use std::time::Duration;

use anyhow::{Result, bail};
use kube::{Api, Client};

/// An error of the API in one sentence, without the client's wrapping.
pub fn api_error(error: kube::Error) -> anyhow::Error {
    match error {
        kube::Error::Api(status) => anyhow::anyhow!("{}", status.message),
        other => other.into(),
    }
}

/// Looks at an object every moment until `done` gives something; the deadline names what was waited for.
pub async fn wait_until<K, T>(
    api: &Api<K>,
    name: &str,
    limit: Duration,
    what: &str,
    mut done: impl FnMut(Option<&K>) -> Option<T>,
) -> Result<T>
where
    K: kube::Resource<DynamicType = ()> + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    let until = tokio::time::Instant::now() + limit;
    loop {
        let object = api.get_opt(name).await.map_err(api_error)?;
        if let Some(value) = done(object.as_ref()) {
            return Ok(value);
        }
        if tokio::time::Instant::now() > until {
            bail!("{name}: not {what} within {} s", limit.as_secs());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// A line on the terminal that shows what is waited for; nothing where there is no terminal.
pub fn progress(quiet: bool, text: String) -> indicatif::ProgressBar {
    let bar = if quiet { indicatif::ProgressBar::hidden() } else { indicatif::ProgressBar::new_spinner() };
    if let Ok(style) = indicatif::ProgressStyle::with_template("{spinner} {elapsed} {msg}") {
        bar.set_style(style);
    }
    bar.set_message(text);
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

/// The typed API of Addax's namespace.
pub fn api<K>(client: &Client) -> Api<K>
where
    K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>,
{
    Api::namespaced(client.clone(), addax_api::NAMESPACE)
}

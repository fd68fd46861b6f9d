//! Writes the CustomResourceDefinitions to `deploy/crds/`: `cargo run -p addax-api --example crdgen`.

use std::error::Error;
use std::path::Path;

fn main() -> Result<(), Box<dyn Error>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/crds");
    std::fs::create_dir_all(&folder)?;
    for crd in addax_api::crds() {
        let file = folder.join(format!("{}.yaml", crd.spec.names.plural));
        std::fs::write(&file, serde_saphyr::to_string(&crd)?)?;
        println!("{}", file.display());
    }
    Ok(())
}

//! Compiles the `.proto` files with protox (no protoc needed).
fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=addax");
    let files = protox::compile(["addax/engine/v1/engine.proto"], ["."])?;
    tonic_prost_build::configure().build_server(true).build_client(true).compile_fds(files)?;
    Ok(())
}

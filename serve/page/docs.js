// Starts Swagger UI on the server's own description. It asks no other host: its validator is off.
window.SwaggerUIBundle({
  url: "/openapi.json",
  dom_id: "#reference",
  validatorUrl: null,
  deepLinking: true,
  tryItOutEnabled: true,
});
